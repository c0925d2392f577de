"""What more than one service needs; a file is named by its subject.

rpc/                 servers, membership, TLS, error edges, the call that carries many streams
etcd/                the client, the registry, elections, model aliases
config/              options from flags, environment and files
service/             a service's process: life, background tasks, metrics, traces, logs
text/                tokenizers and chat templates
errors.py            the errors of the fleet and their gRPC statuses
block_hash.py        the hash of a block; engine, balancer and KV-cache service compare it
request_limits.py    bounds of a request's fields
retry_after.py       the wait that a refused caller is advised to make
answer_collector.py  the messages of a stream as one answer
tasks.py             cancels asyncio tasks, and interrupts one wait with an error
"""
