"""The fleet's gRPC servers: limits, the check of token and proof, health and reflection."""

import hmac
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from inferfleet_proto.internal.v1 import members_pb2_grpc
from services.common import errors
from services.common.rpc import proof, reflection
from services.common.rpc.error_edge import ErrorEdge, refusing_handler
from services.common.rpc.membership import MAX_RECEIVE_BYTES, Membership
from services.common.rpc.metadata import PROOF_KEY, TOKEN_KEY

log = logging.getLogger(__name__)

SHORT_TOKEN = 20
"""A token of fewer characters is warned of: the answer to a challenge lets one test guesses."""
# A service of grpc.health.v1 that serves from start to end, also during a drain. The event loop
# answers it, so a liveness probe notices a loop that stands still; a TCP connect would not.
LIVENESS = "liveness"
# gRPC reports an absent deadline as one that lies centuries ahead.
_NO_DEADLINE_S = 10 * 365 * 86400
_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
    ("grpc.max_send_message_length", MAX_RECEIVE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.so_reuseport", 0),
]


def make_server(
    *,
    membership: Membership | None = None,
    open_services: Sequence[str] = (),
    address: Callable[[], str] = lambda: "",
) -> grpc.aio.Server:
    """Make a server whose handlers may raise FleetError.

    Args:
        membership: if it has a token, calls must show a proof of it, or the token itself, except to
            `open_services`.
        open_services: full names of services that any caller may use; health and reflection
            always are.
        address: returns the host:port under which the server is registered; "" for none.
    """
    interceptors: list[grpc.aio.ServerInterceptor] = []
    members = None
    if membership is not None and membership.token:
        if len(membership.token) < SHORT_TOKEN:
            log.warning(
                "the fleet token has %d characters: whoever can connect may find it by trying; "
                "take 32 or more random ones",
                len(membership.token),
            )
        members = proof.MembersServicer(membership.token, address)
        interceptors.append(_TokenCheck(membership.token, members.life, open_services))
    interceptors.append(ErrorEdge())
    server = grpc.aio.server(interceptors=interceptors, options=_OPTIONS)
    if members is not None:
        members_pb2_grpc.add_MembersServicer_to_server(members, server)
    return server


def add_health_and_reflection(
    server: grpc.aio.Server, service_names: Sequence[str]
) -> health.aio.HealthServicer:
    """Serve grpc.health.v1, and reflection of the named services; all start as SERVING."""
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.add_reflection(server, (*service_names, health.SERVICE_NAME))
    return servicer


async def set_health(
    servicer: health.aio.HealthServicer, service_names: Sequence[str], *, serving: bool
) -> None:
    """Report the named services, and the server as a whole, as serving or not.

    LIVENESS is reported as serving in any case.
    """
    kinds = health_pb2.HealthCheckResponse
    status = kinds.SERVING if serving else kinds.NOT_SERVING
    for name in ("", *service_names):
        await servicer.set(name, status)
    await servicer.set(LIVENESS, kinds.SERVING)


class _HasDeadline(Protocol):
    def time_remaining(self) -> float | None: ...


def remaining_s(context: _HasDeadline) -> float | None:
    """Seconds until the caller's deadline; None if it set none."""
    left = context.time_remaining()
    return None if left is None or left > _NO_DEADLINE_S else left


class _TokenCheck(grpc.aio.ServerInterceptor):
    """Refuses calls that show neither a proof for this server nor the token.

    A proof for another life of the server gets UNAVAILABLE: the caller asks for a new one.
    """

    _ALWAYS_OPEN = (health.SERVICE_NAME, proof.SERVICE_NAME, *reflection.NAMES)

    def __init__(self, token: str, life: bytes, open_services: Sequence[str]) -> None:
        self._accepted = {
            PROOF_KEY: proof.member_proof(token, life).encode(),
            TOKEN_KEY: token.encode(),
        }
        self._open = {*self._ALWAYS_OPEN, *open_services}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        service = handler_call_details.method.split("/")[1]
        if handler is None or service in self._open:
            return handler
        pairs = dict(handler_call_details.invocation_metadata or ())
        for key, accepted in self._accepted.items():
            shown = pairs.get(key, "")
            raw = shown if isinstance(shown, bytes) else shown.encode()
            if hmac.compare_digest(raw, accepted):
                return handler
        if PROOF_KEY in pairs:
            return refusing_handler(
                handler, errors.UnavailableError("the proof of membership is for another process")
            )
        return refusing_handler(
            handler, errors.PermissionDeniedError("only members of the fleet may call")
        )
