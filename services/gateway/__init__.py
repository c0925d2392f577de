"""The gateway: the public face of the fleet, over gRPC and OpenAI-compatible HTTP.

service.py     puts the parts together; config.py: the options
servicer.py    gRPC face        openai/   HTTP face
request/       one request from arrival to end, for both faces
callers/       API keys, quotas, usage records, audit log
models/        names, revisions, tokenizers and chat templates
answers/       splits answers into content, reasoning and tool calls
balancers.py   opens streams at balancers; upstream.py: one open stream
metrics.py     the span and the metrics of a request; message_tags.py: tells deltas apart
"""
