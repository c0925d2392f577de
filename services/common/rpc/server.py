"""The fleet's gRPC servers: limits, the token check, health and reflection."""

import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from services.common import errors
from services.common.rpc import reflection
from services.common.rpc.error_edge import ErrorEdge, refusing_handler
from services.common.rpc.membership import MAX_RECEIVE_BYTES, Membership
from services.common.rpc.metadata import TOKEN_KEY

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
    *, membership: Membership | None = None, open_services: Sequence[str] = ()
) -> grpc.aio.Server:
    """Make a server whose handlers may raise FleetError.

    Args:
        membership: if it has a token, calls must show the token, except to `open_services`.
        open_services: full names of services that any caller may use; health and reflection
            always are.
    """
    interceptors: list[grpc.aio.ServerInterceptor] = []
    if membership is not None and membership.token:
        interceptors.append(_TokenCheck(membership.token, open_services))
    interceptors.append(ErrorEdge())
    return grpc.aio.server(interceptors=interceptors, options=_OPTIONS)


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
    """Report the named services, and the server as a whole, as serving or not."""
    kinds = health_pb2.HealthCheckResponse
    status = kinds.SERVING if serving else kinds.NOT_SERVING
    for name in ("", *service_names):
        await servicer.set(name, status)


class _HasDeadline(Protocol):
    def time_remaining(self) -> float | None: ...


def remaining_s(context: _HasDeadline) -> float | None:
    """Seconds until the caller's deadline; None if it set none."""
    left = context.time_remaining()
    return None if left is None or left > _NO_DEADLINE_S else left


class _TokenCheck(grpc.aio.ServerInterceptor):
    """Refuses calls without the fleet's token with PERMISSION_DENIED."""

    _ALWAYS_OPEN = (health.SERVICE_NAME, *reflection.NAMES)

    def __init__(self, token: str, open_services: Sequence[str]) -> None:
        self._token = token.encode()
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
        shown = dict(handler_call_details.invocation_metadata or ()).get(TOKEN_KEY, "")
        raw = shown if isinstance(shown, bytes) else shown.encode()
        if hmac.compare_digest(raw, self._token):
            return handler
        return refusing_handler(
            handler, errors.PermissionDeniedError("only members of the fleet may call")
        )
