"""One carried stream on the calling side; it stands in for a call of grpc.aio."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import grpc

from services.common import errors
from services.common.rpc.carrier.surface import RunCall

WINDOW_BYTES = 2048
"""How far a producer may run ahead of its reader; see STREAM_OPTIONS in rpc/membership.py."""


class Sender(Protocol):
    """What a stream needs of its carrier."""

    def send_credit(self, stream: int, taken_bytes: int) -> None:
        """Let the producer send as many bytes more as the reader has taken."""

    def send_cancel(self, stream: int) -> None:
        """Let the producer stop: its messages are no longer read."""

    def forget(self, stream: int) -> None:
        """Drop the stream: it has ended."""


class CarriedCall:
    """Owned by the carrier, read by one task. Ends and fails as a call of grpc.aio does."""

    def __init__(self, sender: Sender, stream: int, timeout_s: float | None) -> None:
        self._sender = sender
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        self._messages: deque[bytes] = deque()
        self._taken_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._metadata: grpc.aio.Metadata = grpc.aio.Metadata()
        self._done = False
        self._cancelled = False
        self._error: grpc.aio.AioRpcError | None = None
        self._timer: asyncio.TimerHandle | None = None
        if timeout_s is not None:
            self._timer = self._loop.call_later(max(timeout_s, 0), self._expire)

    def done(self) -> bool:
        """Whether it has ended; messages may still be there to read."""
        return self._done

    def cancelled(self) -> bool:
        """Whether its caller cancelled it."""
        return self._cancelled

    def cancel(self) -> bool:
        """Stop the producer; a reader gets CancelledError. Returns False if it had ended."""
        if self._done:
            return False
        self._cancelled = True
        self._messages.clear()
        self._sender.send_cancel(self._stream)
        self._end()
        return True

    async def initial_metadata(self) -> grpc.aio.Metadata:
        """The other side's metadata; empty until the first message is here."""
        return self._metadata

    async def take_messages(self) -> Sequence[bytes]:
        """Wait for a message and take all that are here; empty when the stream ended with OK.

        Raises:
            grpc.aio.AioRpcError: the stream ended with another status.
            CancelledError: the call was cancelled.
        """
        messages = self._messages
        while not messages:
            if self._done:
                self._raise_for_status()
                return ()
            await self._wait_message()
        taken = list(messages)
        messages.clear()
        self._grant_credit(sum(map(len, taken)))
        return taken

    async def read(self) -> Any:
        """The next message, or grpc.aio.EOF; raises as `take_messages`."""
        while not self._messages:
            if self._done:
                self._raise_for_status()
                return grpc.aio.EOF
            await self._wait_message()
        message = self._messages.popleft()
        self._grant_credit(len(message))
        return message

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    # Called by the carrier.

    def feed(self, message: bytes) -> None:
        """Add a message that has arrived."""
        if not self._cancelled:
            self._messages.append(message)
            if self._waiter is not None:
                self._wake()

    def set_metadata(self, metadata: Sequence[tuple[str, str]]) -> None:
        """Set the initial metadata that has arrived."""
        self._metadata = grpc.aio.Metadata(*metadata)

    def end(self, code: grpc.StatusCode, message: str, details: bytes) -> None:
        """End the stream with a status; `details` is a serialised google.rpc.Status, or empty."""
        if self._done:
            return
        if code is not grpc.StatusCode.OK:
            trailers = [(errors.DETAILS_KEY, details)] if details else []
            self._error = grpc.aio.AioRpcError(
                code, self._metadata, grpc.aio.Metadata(*trailers), details=message
            )
        self._end()

    def _expire(self) -> None:
        self._timer = None
        if not self._done:
            self._sender.send_cancel(self._stream)
            self.end(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", b"")

    def _end(self) -> None:
        self._done = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._sender.forget(self._stream)
        if self._waiter is not None:
            self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _wait_message(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        except asyncio.CancelledError:
            self.cancel()
            raise
        finally:
            self._waiter = None

    def _grant_credit(self, taken: int) -> None:
        self._taken_bytes += taken
        if self._taken_bytes >= WINDOW_BYTES // 2 and not self._done:
            self._sender.send_credit(self._stream, self._taken_bytes)
            self._taken_bytes = 0

    def _raise_for_status(self) -> None:
        if self._cancelled:
            raise asyncio.CancelledError
        if self._error is not None:
            raise self._error


async def take_messages(call: RunCall) -> Sequence[bytes]:
    """Wait for a message of a Run call and take all that are here; empty when it ended with OK.

    Args:
        call: a carried one, or one of grpc.aio's own, which gives one message at a time.

    Raises:
        grpc.aio.AioRpcError: the call ended with another status.
        CancelledError: the call was cancelled.
    """
    if isinstance(call, CarriedCall):
        return await call.take_messages()
    message = await call.read()
    return () if message is grpc.aio.EOF else (message,)
