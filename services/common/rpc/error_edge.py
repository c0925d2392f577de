"""The edge of every gRPC server: parses requests and turns errors of handlers into statuses."""

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from services.common import errors

log = logging.getLogger(__name__)


def parse_message(raw: bytes, parse: Callable[[bytes], Any]) -> Any:
    """Parse a message of a caller.

    Raises:
        InvalidArgumentError: the bytes are not a valid message.
    """
    try:
        return parse(raw)
    except DecodeError as error:
        raise errors.InvalidArgumentError(
            f"the message is not a valid protobuf: {error}", reason="MALFORMED_MESSAGE"
        ) from error


def fleet_error_of(error: Exception, method: str) -> errors.FleetError:
    """The error that a caller gets for an exception of a handler; logs one that is a bug."""
    if isinstance(error, grpc.RpcError):
        error = errors.error_of(error)
    if isinstance(error, errors.FleetError):
        return error
    # An InternalError of the transport mostly means that the call ended while the handler ran.
    level = logging.DEBUG if isinstance(error, grpc.aio.InternalError) else logging.ERROR
    log.log(level, "unhandled error in %s", method, exc_info=error)
    return errors.InternalError(f"internal error: {type(error).__name__}")


class ErrorEdge(grpc.aio.ServerInterceptor):
    """Wraps every handler: parses its requests, and aborts the call with what it raises."""

    def __init__(self) -> None:
        self._guarded: dict[str, tuple[Any, Any]] = {}
        """(handler, wrapped handler) by method; bounded by the server's methods."""

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
            guarded = _guard(handler, method)
            self._guarded[method] = handler, guarded
        return guarded


def refusing_handler(handler: Any, error: errors.FleetError) -> Any:
    """A handler of the same kind that ends every call with `error`."""

    async def answer(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        await abort_call(context, error, "")

    async def stream(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        await abort_call(context, error, "")
        yield b""

    return _rebuild(handler, stream if handler.response_streaming else answer)


async def abort_call(
    context: grpc.aio.ServicerContext[Any, Any], error: Exception, method: str
) -> None:
    """End a call with the status of an error.

    Raises:
        grpc.aio.AbortError: always, as gRPC demands; or
        CancelledError: the call had ended already, so no status can be sent.
    """
    if isinstance(error, grpc.aio.AbortError):
        raise error
    answer = fleet_error_of(error, method)
    message = answer.message[: errors.MAX_MESSAGE_CHARS]
    try:
        await context.abort(answer.code, message, errors.trailers_of(answer))
    except grpc.aio.InternalError as gone:
        raise asyncio.CancelledError from gone


def _guard(handler: Any, method: str) -> Any:
    parse = handler.request_deserializer or bytes
    inner = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )

    def request_of(raw: Any) -> Any:
        return _parse_stream(raw, parse) if handler.request_streaming else parse_message(raw, parse)

    async def answer(raw: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            return await inner(request_of(raw), context)
        except Exception as error:
            await abort_call(context, error, method)

    async def stream(raw: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        # It writes by itself instead of yielding: when a caller leaves, the handler's generator
        # then ends at once, not when it is garbage-collected.
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
            await abort_call(context, error, method)

    return _rebuild(handler, stream if handler.response_streaming else answer)


def _rebuild(handler: Any, behaviour: Any) -> Any:
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[bool(handler.request_streaming), bool(handler.response_streaming)]
    return make(behaviour, None, handler.response_serializer)


async def _parse_stream(
    raw: AsyncIterator[bytes], parse: Callable[[bytes], Any]
) -> AsyncIterator[Any]:
    async for message in raw:
        yield parse_message(message, parse)
