"""gRPC as the fleet uses it: limits and keepalive on both sides, TLS, membership, error edges."""

import asyncio
import contextlib
import hmac
import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from services.common import errors
from services.common.config.service_config import ServiceConfig
from services.common.config.settings import ConfigError, read_secret
from services.common.rpc.fresh_channel import FreshChannel
from services.common.rpc.tls_files import Pems, TlsFiles

log = logging.getLogger(__name__)

MAX_RECEIVE_BYTES = 16 * 1024 * 1024
MAX_SEND_BYTES = 4 * 1024 * 1024
TOKEN_KEY = "inferfleet-fleet-token"
REQUEST_ID_KEY = "inferfleet-request-id"
ENGINE_ID_KEY = "inferfleet-engine-id"
TRACE_ID_KEY = "inferfleet-trace-id"
# gRPC reports an absent deadline as one that lies centuries ahead.
_NO_DEADLINE_S = 10 * 365 * 86400

_SERVER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
    ("grpc.max_send_message_length", MAX_RECEIVE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.so_reuseport", 0),
]
# A stream is let ahead of its reader by this much and no more: whoever produces it joins what comes
# meanwhile, so a hop that is behind gets fewer, longer messages. A longer message still passes.
STREAM_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.http2.lookahead_bytes", 2048),
    ("grpc.http2.bdp_probe", 0),
]
# For calls that carry many streams, each with a window of its own.
_CARRIER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.http2.lookahead_bytes", 256 * 1024),
    ("grpc.http2.bdp_probe", 0),
]
_CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
    ("grpc.max_send_message_length", MAX_RECEIVE_BYTES),
    # A peer that is there and silent is given up after 11 + 8 s. What counts is the ping's timeout,
    # a minute by default; servers of the version before allow no ping more often than every 10 s.
    ("grpc.keepalive_time_ms", 11_000),
    ("grpc.keepalive_timeout_ms", 8_000),
    ("grpc.http2.ping_timeout_ms", 8_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # A peer that restarted on the same address is reached again within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
]


@dataclass(frozen=True)
class Membership:
    """How members of the fleet know each other: a token, mutual TLS, or (local only) neither."""

    token: str | None = None
    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = None
    files: TlsFiles | None = None
    """Where the three come from; new connections then use what is there when they are made."""

    @classmethod
    def from_config(cls, config: ServiceConfig) -> "Membership":
        """Read the files named in the configuration.

        Raises:
            ConfigError: a file is missing, or only a part of the TLS keys is set.
        """
        names = ("tls_ca_file", "tls_cert_file", "tls_key_file")
        paths = {name: getattr(config, name) for name in names}
        missing = [name for name, path in paths.items() if not path]
        if missing and len(missing) < len(names):
            raise ConfigError(f"{missing[0]}: needed, because other tls_*_file keys are set")
        token = None
        if config.fleet_token_file:
            token = read_secret(config.fleet_token_file, "fleet_token_file")
        if missing:
            return cls(token=token)
        for name in names:
            _check_readable(paths[name], name)
        try:
            files = TlsFiles(*(paths[name] for name in names))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"tls_cert_file: {paths['tls_cert_file']} with its tls_key_file and tls_ca_file is "
                f"no certificate in PEM: {error}"
            ) from error
        _, pems = files.newest()
        return cls(token=token, ca=pems.ca, cert=pems.cert, key=pems.key, files=files)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a member adds to each call."""
        return ((TOKEN_KEY, self.token),) if self.token else ()

    @property
    def version(self) -> int:
        """Of the certificates: differs once new connections are made with others."""
        return self.files.newest()[0] if self.files is not None else 0

    def channel(self, address: str, *, carries_many: bool = False) -> grpc.aio.Channel:
        """A channel to another member; connects on first use and reconnects by itself.

        Args:
            carries_many: for calls whose one stream holds those of many requests.
        """
        options = (_CARRIER_OPTIONS if carries_many else STREAM_OPTIONS) + _CHANNEL_OPTIONS
        if self.ca is None:
            return grpc.aio.insecure_channel(address, options=options)
        if self.files is not None:
            return FreshChannel(address, self.files, options)
        credentials = grpc.ssl_channel_credentials(self.ca, self.key, self.cert)
        return grpc.aio.secure_channel(address, credentials, options=options)

    def bind(self, server: grpc.aio.Server, address: str, *, members_only: bool = True) -> int:
        """Listen on host:port (port 0: a free one) and return the port.

        Args:
            members_only: with TLS, demand a certificate of the caller as well.

        Raises:
            ConfigError: the port cannot be had.
        """
        try:
            if self.ca is None:
                port = server.add_insecure_port(address)
            else:
                port = server.add_secure_port(address, self._server_credentials(members_only))
        except RuntimeError as error:
            raise ConfigError(f"port: cannot listen on {address}: {error}") from error
        if port == 0:
            raise ConfigError(f"port: cannot listen on {address}")
        return port

    def _server_credentials(self, members_only: bool) -> grpc.ServerCredentials:
        given, files = 1, self.files

        def configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
            return grpc.ssl_server_certificate_configuration(
                [(pems.key or b"", pems.cert or b"")],
                root_certificates=pems.ca if members_only else None,
            )

        def newer() -> grpc.ServerCertificateConfiguration | None:
            """Asked before each handshake, by a thread of gRPC's own."""
            nonlocal given
            if files is None:
                return None
            version, pems = files.newest()
            if version == given:
                return None
            given = version
            return configuration(pems)

        first = Pems(self.ca, self.cert, self.key)
        if files is not None:
            given, first = files.newest()
        fetch: Any = newer  # None is allowed, whatever the stub's type says
        return grpc.dynamic_ssl_server_credentials(
            configuration(first), fetch, require_client_authentication=members_only
        )


def make_server(
    *, membership: Membership | None = None, open_services: Sequence[str] = ()
) -> grpc.aio.Server:
    """A server whose handlers may raise FleetError.

    Args:
        membership: if it has a token, calls must show it, except to `open_services`.
        open_services: full names of services anyone may call (health and reflection always are).
    """
    interceptors: list[grpc.aio.ServerInterceptor] = []
    if membership is not None and membership.token:
        interceptors.append(_MembersOnly(membership.token, open_services))
    interceptors.append(_Edge())
    return grpc.aio.server(interceptors=interceptors, options=_SERVER_OPTIONS)


def add_health_and_reflection(
    server: grpc.aio.Server, service_names: Sequence[str]
) -> health.aio.HealthServicer:
    """Serve grpc.health.v1 and reflection for the named services; all start as SERVING."""
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    names = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    return servicer


async def set_health(
    servicer: health.aio.HealthServicer, service_names: Sequence[str], *, serving: bool
) -> None:
    """Report all named services, and the server as a whole, as serving or not."""
    kinds = health_pb2.HealthCheckResponse
    status = kinds.SERVING if serving else kinds.NOT_SERVING
    for name in ("", *service_names):
        await servicer.set(name, status)


class _MembersOnly(grpc.aio.ServerInterceptor):
    _ALWAYS_OPEN = ("grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection")

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
        return _refusing(
            handler, errors.PermissionDeniedError("only members of the fleet may call")
        )


class _Edge(grpc.aio.ServerInterceptor):
    """Parses requests inside our own guard and turns what handlers raise into statuses."""

    def __init__(self) -> None:
        self._guarded: dict[str, tuple[Any, Any]] = {}
        """By method: its handler, and what guards it. As many as the server's methods."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith("/grpc."):
            return handler
        known, guarded = self._guarded.get(method, (None, None))
        if known is not handler:
            guarded = _guarded(handler, method)
            self._guarded[method] = handler, guarded
        return guarded


def _guarded(handler: Any, method: str) -> Any:
    parse = handler.request_deserializer or bytes
    inner = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )

    def request_of(raw: Any) -> Any:
        return _parsed_stream(raw, parse) if handler.request_streaming else parsed(raw, parse)

    async def answer(raw: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await inner(request_of(raw), context)
        except Exception as error:
            await _abort(context, error, method)

    async def stream(raw: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        # Writes by itself instead of yielding: a caller that leaves then ends the handler's own
        # generator at once, not when the garbage collector finds it.
        try:
            messages = inner(request_of(raw), context)
            if inspect.isawaitable(messages):
                await messages
                return
            async with contextlib.AsyncExitStack() as stack:
                if isinstance(messages, AsyncGenerator):
                    await stack.enter_async_context(contextlib.aclosing(messages))
                async for message in messages:
                    await context.write(message)
        except Exception as error:
            await _abort(context, error, method)

    return _rebuilt(handler, stream if handler.response_streaming else answer)


def _rebuilt(handler: Any, behaviour: Any) -> Any:
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[bool(handler.request_streaming), bool(handler.response_streaming)]
    return make(behaviour, None, handler.response_serializer)


def _refusing(handler: Any, error: errors.FleetError) -> Any:
    async def answer(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        await _abort(context, error, "")

    async def stream(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        await _abort(context, error, "")
        yield b""

    return _rebuilt(handler, stream if handler.response_streaming else answer)


def parsed(raw: bytes, parse: Callable[[bytes], Any]) -> Any:
    """A message of a caller.

    Raises:
        InvalidArgumentError: it is none.
    """
    try:
        return parse(raw)
    except DecodeError as error:
        raise errors.InvalidArgumentError(
            f"the message is not a valid protobuf: {error}", reason="MALFORMED_MESSAGE"
        ) from error


async def _parsed_stream(
    raw: AsyncIterator[bytes], parse: Callable[[bytes], Any]
) -> AsyncIterator[Any]:
    async for message in raw:
        yield parsed(message, parse)


async def _abort(
    context: grpc.aio.ServicerContext[Any, Any], error: Exception, method: str
) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    told = told_as(error, method)
    try:
        await context.abort(told.code, told.message[:1024], errors.trailers_of(told))
    except grpc.aio.InternalError as gone:
        raise asyncio.CancelledError from gone  # the call has ended: nobody is left to tell


def told_as(error: Exception, method: str) -> errors.FleetError:
    """What a caller is told of an exception that a handler has raised."""
    if isinstance(error, grpc.RpcError):
        error = errors.error_of(error)
    if isinstance(error, errors.FleetError):
        return error
    # What the transport raises is mostly a call that has just ended, told to a handler late.
    level = logging.DEBUG if isinstance(error, grpc.aio.InternalError) else logging.ERROR
    log.log(level, "unhandled error in %s", method, exc_info=error)
    return errors.InternalError(f"internal error: {type(error).__name__}")


def _check_readable(path: str, key: str) -> None:
    try:
        Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}: cannot read {path}: {error.strerror}") from error


def remaining_s(context: grpc.aio.ServicerContext[Any, Any]) -> float | None:
    """Seconds until the caller's deadline, or None if it set none."""
    left = context.time_remaining()
    return None if left is None or left > _NO_DEADLINE_S else left
