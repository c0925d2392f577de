"""gRPC as the fleet uses it; `from services.common import rpc` gives what most callers need.

membership.py      how members of the fleet authenticate, connect and listen
proof.py           proofs that members know the token, instead of the token itself
server.py          servers: health, the check of token and proof
reflection.py      reflection, v1 and v1alpha
error_edge.py      errors raised by handlers become gRPC statuses
metadata.py        keys of the metadata
fresh_channel.py   channels that follow replaced certificates
tls_files.py       certificates that are read again when their files change
continuation.py    what a resumed stream starts from
carrier/           many streams of two services in one call
"""

from services.common.rpc.error_edge import fleet_error_of, parse_message
from services.common.rpc.membership import MAX_RECEIVE_BYTES, STREAM_OPTIONS, Membership
from services.common.rpc.metadata import ENGINE_ID_KEY, REQUEST_ID_KEY, TOKEN_KEY, TRACE_ID_KEY
from services.common.rpc.proof import Peer, UnprovenPeerError
from services.common.rpc.server import (
    add_health_and_reflection,
    make_server,
    remaining_s,
    set_health,
)

__all__ = [
    "ENGINE_ID_KEY",
    "MAX_RECEIVE_BYTES",
    "REQUEST_ID_KEY",
    "STREAM_OPTIONS",
    "TOKEN_KEY",
    "TRACE_ID_KEY",
    "Membership",
    "Peer",
    "UnprovenPeerError",
    "add_health_and_reflection",
    "fleet_error_of",
    "make_server",
    "parse_message",
    "remaining_s",
    "set_health",
]
