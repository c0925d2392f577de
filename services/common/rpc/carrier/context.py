"""One carried stream on the answering side; it stands in for a context of grpc.aio."""

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, Protocol

import grpc

from inferfleet_proto.internal.v1 import engine_pb2
from services.common import errors
from services.common.rpc.carrier.outbox import BATCH_BYTES, Outbox
from services.common.rpc.carrier.surface import Pairs, RunContext
from services.common.rpc.membership import MAX_RECEIVE_BYTES

MAX_ENDINGS = 128
"""Statuses of ended streams that go in one message of the call."""
_MAX_MESSAGE_BYTES = MAX_RECEIVE_BYTES - BATCH_BYTES - 2 * MAX_ENDINGS * errors.MAX_DETAILS_BYTES


class Ending(NamedTuple):
    """The status that a stream ends with."""

    code: grpc.StatusCode
    message: str = ""
    details: bytes = b""
    """A serialised google.rpc.Status, or empty."""


class AnswerSender(Protocol):
    """What a stream needs of the RunMany call that it is in."""

    outbox: Outbox

    def send_metadata(self, stream: int, pairs: Pairs) -> None:
        """Send the stream's initial metadata."""

    def send_message(self, stream: int, message: bytes) -> None:
        """Send a message of the stream."""


class CarriedContext:
    """The context of one carried stream; owned by the RunMany call that the stream is in.

    Args:
        serialise: of the messages that the handler writes; None if they are bytes.
        peer: address of the caller.
    """

    def __init__(
        self,
        sender: AnswerSender,
        opening: engine_pb2.Opening,
        *,
        serialise: Callable[[Any], bytes] | None,
        peer: str,
    ) -> None:
        self._sender = sender
        self._stream = opening.stream
        self._metadata = tuple((header.key, header.value) for header in opening.metadata)
        self._loop = asyncio.get_running_loop()
        self._deadline = self._loop.time() + opening.timeout_s if opening.timeout_s else None
        self._credit_bytes = opening.window_bytes
        self._credit_waiter: asyncio.Future[None] | None = None
        self._peer = peer
        self._callbacks: list[Callable[[Any], None]] = []
        self._serialise = serialise
        self._over = False
        self.ending: Ending | None = None
        """The status that the handler or the caller ended the stream with; None: the handler's
        own end decides."""

    def invocation_metadata(self) -> Pairs:
        return self._metadata

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else max(self._deadline - self._loop.time(), 0.0)

    def peer(self) -> str:
        return self._peer

    def cancelled(self) -> bool:
        return self._over

    def done(self) -> bool:
        return self._over

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    async def send_initial_metadata(self, pairs: Pairs) -> None:
        self._sender.send_metadata(self._stream, pairs)

    async def write(self, message: Any) -> None:
        """Send a message; return when the reader is ready for the next one.

        Raises:
            ResourceExhaustedError: the message is too long for the call.
            CancelledError: the stream is over.
        """
        if self._over:
            raise asyncio.CancelledError
        raw = message if self._serialise is None else self._serialise(message)
        if len(raw) > _MAX_MESSAGE_BYTES:
            raise errors.ResourceExhaustedError(
                f"the message has {len(raw)} bytes; the limit is {_MAX_MESSAGE_BYTES}",
                reason="MESSAGE_TOO_LONG",
            )
        self._sender.send_message(self._stream, raw)
        self._credit_bytes -= len(raw)
        while self._credit_bytes <= 0:
            self._credit_waiter = self._loop.create_future()
            await self._credit_waiter

    async def wait_sent(self) -> None:
        """See the function of this name."""
        outbox = self._sender.outbox
        if outbox.busy:
            await outbox.wait_collected()

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailers: Pairs = ()
    ) -> NoReturn:
        raw = dict(trailers).get(errors.DETAILS_KEY, b"")
        self.ending = Ending(code, details, raw if isinstance(raw, bytes) else raw.encode())
        raise grpc.aio.AbortError

    # Called by the RunMany call.

    def add_credit(self, taken_bytes: int) -> None:
        """Let the handler write as many bytes more as the reader has taken."""
        self._credit_bytes += taken_bytes
        waiter, self._credit_waiter = self._credit_waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def finish(self) -> None:
        """Mark the stream as over and call the callbacks; idempotent."""
        if not self._over:
            self._over = True
            for callback in self._callbacks:
                callback(self)


async def wait_sent(context: RunContext) -> None:
    """Wait until the messages that a handler of Run has written are on their way.

    The handler can then join the events of this time into one message. In a call of its own
    `write` has waited already.
    """
    if isinstance(context, CarriedContext):
        await context.wait_sent()
