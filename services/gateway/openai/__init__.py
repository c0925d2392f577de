"""The OpenAI-compatible HTTP face.

app.py              routes, model listing, unsupported paths
endpoint.py         one generation: JSON body in, JSON or server-sent events out
health.py           /livez, /healthz
cors.py             which web pages may call
body.py             reads the bounded body; parsed_body.py: its meaning
content_encoding.py inflates compressed bodies; json_size.py: bounds the values of large ones
fields.py           reads JSON field by field
chat_request.py, completion_request.py, shared_fields.py, tool_fields.py   JSON → protobuf
stream_group.py     the streams of one body, one per prompt
sse.py              writes server-sent events
answer_format.py, chat_format.py, completion_format.py, logprobs.py        protobuf → JSON
errors.py           the fleet's errors in OpenAI's form
http_server.py      uvicorn inside the gateway's event loop
old_clients.py      streams for HTTP/1.0
http_connection.py, http_bounds.py   what a connection may send, and how slowly
"""
