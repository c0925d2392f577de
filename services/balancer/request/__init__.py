"""One request at the balancer, from arrival to end.

run_servicer.py      the gRPC methods Run and RunMany
incoming.py          the request as bytes, parsed, and as routing needs it
engine_stream.py     owns the request: waits for a slot, forwards, resumes after a failure
attempt.py           one attempt at one engine: choose it, send the request
recovery.py          what follows a failed attempt
failure.py           what a failure means: whose fault, may another engine try
span_attributes.py   decisions and failures in the trace
dependencies.py      the parts of the balancer that every stream uses
"""
