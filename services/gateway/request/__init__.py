"""One request at the gateway, in the order in which it passes these files.

caller.py           what a face passes on about its caller
gateway_stream.py   the request from arrival to end; dependencies.py: the parts that it uses
checks.py           refuses invalid requests before any costly work
in_flight.py        one slot per running request; drains the gateway
admission.py        from a public request to an EngineRequest
text_calls.py       Tokenize and Detokenize: quotas, metrics, audit
reroute.py          another revision, if the chosen one has no engine left
joining.py          merges deltas that arrive at the same time
"""
