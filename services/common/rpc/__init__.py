"""gRPC as the fleet uses it; `from services.common import rpc` gives what most callers need.

server.py          servers, channels, membership, error edges
fresh_channel.py   channels that follow changed certificates
tls_files.py       certificates read again when they change
continuation.py    what a resumed stream starts from
carrier/           many streams of two services in one call
"""

from services.common.rpc.server import (
    ENGINE_ID_KEY,
    MAX_RECEIVE_BYTES,
    REQUEST_ID_KEY,
    STREAM_OPTIONS,
    TOKEN_KEY,
    TRACE_ID_KEY,
    Membership,
    add_health_and_reflection,
    make_server,
    parsed,
    remaining_s,
    set_health,
    told_as,
)

__all__ = [
    "ENGINE_ID_KEY",
    "MAX_RECEIVE_BYTES",
    "REQUEST_ID_KEY",
    "STREAM_OPTIONS",
    "TOKEN_KEY",
    "TRACE_ID_KEY",
    "Membership",
    "add_health_and_reflection",
    "make_server",
    "parsed",
    "remaining_s",
    "set_health",
    "told_as",
]
