"""The OpenAI-compatible HTTP face.

app.py                   routes, models, refusals
endpoint.py              one generation: body in, JSON or SSE out, the client's leaving noticed
fields.py, shared_fields.py, chat_request.py, completion_request.py      JSON to our messages
chat_format.py, completion_format.py, logprobs.py                        our messages to JSON
errors.py                our errors as theirs
http_server.py           uvicorn inside the gateway's loop
"""
