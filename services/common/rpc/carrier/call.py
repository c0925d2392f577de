"""One carried stream as its caller sees it: the part of a grpc.aio call that the fleet uses."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import grpc

from services.common import errors

# As far as a producer is let ahead of its reader; see STREAM_OPTIONS in rpc.
WINDOW_BYTES = 2048


class Sender(Protocol):
    """What a stream needs of its carrier."""

    def credit(self, stream: int, taken: int) -> None:
        """The reader has taken so many bytes."""

    def cancelled(self, stream: int) -> None:
        """Nobody reads it any more."""

    def ended(self, stream: int) -> None:
        """Nothing more will be told of it."""


class CarriedCall:
    """Owned by the carrier, read by one task. Ends and fails as a grpc.aio call does."""

    def __init__(self, sender: Sender, stream: int, timeout_s: float | None) -> None:
        self._sender = sender
        self._stream = stream
        self._loop = asyncio.get_running_loop()
        self._messages: deque[bytes] = deque()
        self._taken_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._greeting: grpc.aio.Metadata = grpc.aio.Metadata()
        self._done = False
        self._cancelled = False
        self._error: grpc.aio.AioRpcError | None = None
        self._timer: asyncio.TimerHandle | None = None
        if timeout_s is not None:
            self._timer = self._loop.call_later(max(timeout_s, 0), self._late)

    def done(self) -> bool:
        """Whether it has ended, one way or another; messages may still be there to read."""
        return self._done

    def cancelled(self) -> bool:
        """Whether it was ended by its caller."""
        return self._cancelled

    def cancel(self) -> bool:
        """Tell the other side that nobody reads any more; a reader gets CancelledError."""
        if self._done:
            return False
        self._cancelled = True
        self._messages.clear()
        self._sender.cancelled(self._stream)
        self._end()
        return True

    async def initial_metadata(self) -> grpc.aio.Metadata:
        """Only once the first message is here."""
        return self._greeting

    async def take(self) -> Sequence[bytes]:
        """All messages that are here, waiting for one; none: the stream has ended with OK.

        Raises:
            grpc.aio.AioRpcError: it has ended with another status.
            CancelledError: it was cancelled.
        """
        messages = self._messages
        while not messages:
            if self._done:
                self._raise_for_status()
                return ()
            await self._wait()
        taken = list(messages)
        messages.clear()
        self._account(sum(map(len, taken)))
        return taken

    async def read(self) -> Any:
        """One message, or grpc.aio.EOF; raises as `take`."""
        while not self._messages:
            if self._done:
                self._raise_for_status()
                return grpc.aio.EOF
            await self._wait()
        message = self._messages.popleft()
        self._account(len(message))
        return message

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    # What the carrier tells.

    def feed(self, message: bytes) -> None:
        """A message has come."""
        if not self._cancelled:
            self._messages.append(message)
            if self._waiter is not None:
                self._wake()

    def greet(self, metadata: Sequence[tuple[str, str]]) -> None:
        """Initial metadata has come."""
        self._greeting = grpc.aio.Metadata(*metadata)

    def end(self, code: grpc.StatusCode, message: str, details: bytes) -> None:
        """The stream is over."""
        if self._done:
            return
        if code is not grpc.StatusCode.OK:
            trailers = [(errors.DETAILS_KEY, details)] if details else []
            self._error = grpc.aio.AioRpcError(
                code, self._greeting, grpc.aio.Metadata(*trailers), details=message
            )
        self._end()

    def _late(self) -> None:
        self._timer = None
        if not self._done:
            self._sender.cancelled(self._stream)
            self.end(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", b"")

    def _end(self) -> None:
        self._done = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._sender.ended(self._stream)
        if self._waiter is not None:
            self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        except asyncio.CancelledError:
            self.cancel()
            raise
        finally:
            self._waiter = None

    def _account(self, taken: int) -> None:
        self._taken_bytes += taken
        if self._taken_bytes >= WINDOW_BYTES // 2 and not self._done:
            self._sender.credit(self._stream, self._taken_bytes)
            self._taken_bytes = 0

    def _raise_for_status(self) -> None:
        if self._cancelled:
            raise asyncio.CancelledError
        if self._error is not None:
            raise self._error


async def take(call: Any) -> Sequence[bytes]:
    """The messages that a Run call has now, waiting for one; none: it has ended with OK.

    Args:
        call: a carried one, or grpc.aio's own, which gives one at a time.
    """
    if isinstance(call, CarriedCall):
        return await call.take()
    message = await call.read()
    return () if message is grpc.aio.EOF else (message,)
