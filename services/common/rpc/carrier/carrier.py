"""The calling side of one RunMany call: opens streams and dispatches the frames that arrive."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import grpc

from inferfleet_proto.internal.v1 import engine_pb2
from services.common.rpc.carrier.call import WINDOW_BYTES, CarriedCall
from services.common.rpc.carrier.outbox import BATCH_BYTES, Outbox
from services.common.tasks import cancel_and_wait

RUN_MANY = "/inferfleet.internal.v1.Engine/RunMany"
_STATUSES = {code.value[0]: code for code in grpc.StatusCode}


class Carrier:
    """One RunMany call and the streams in it.

    When the call ends, every stream in it ends with UNAVAILABLE and no details, as a call of its
    own does when its connection is lost.

    Args:
        call: a RunMany call that has just begun.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._calls: dict[int, CarriedCall] = {}
        self._last_stream = 0
        self._opened: list[engine_pb2.Opening] = []
        self._credits: dict[int, int] = {}
        self._cancelled: list[int] = []
        self._outbox = Outbox(self._collect, call.write)
        self._writing: asyncio.Task[None] | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self.up = False
        """Whether the other side serves RunMany and the connection stands."""

    async def wait_up(self) -> None:
        """Wait for the other side's first message.

        Raises:
            grpc.RpcError: the call failed; UNIMPLEMENTED if the other side serves no RunMany.
            ConnectionError: the call ended without a message.
        """
        if await self._call.read() is grpc.aio.EOF:
            raise ConnectionError("RunMany ended without a message")
        self.up = True

    def open(
        self, request: bytes, metadata: Sequence[tuple[str, Any]], timeout_s: float | None
    ) -> CarriedCall:
        """Begin a stream; only while `up`. `request` is a serialised EngineRequest."""
        self._last_stream += 1
        stream = self._last_stream
        call = self._calls[stream] = CarriedCall(self, stream, timeout_s)
        self._idle.clear()
        opening = engine_pb2.Opening(stream=stream, request=request, window_bytes=WINDOW_BYTES)
        for key, value in metadata:
            opening.metadata.add(key=key, value=value)
        if timeout_s is not None:
            opening.timeout_s = max(timeout_s, 1e-6)
        self._opened.append(opening)
        self._outbox.notify()
        return call

    async def run(self) -> None:
        """Dispatch frames until the call ends; raises nothing but CancelledError."""
        self._writing = asyncio.create_task(self._write(), name="carrier writes")
        problem = "the connection was closed"
        try:
            while (raw := await self._call.read()) is not grpc.aio.EOF:
                self._dispatch(engine_pb2.AnswerFrames.FromString(raw))
        except grpc.aio.AioRpcError as error:
            problem = error.details() or problem
        finally:
            self.up = False
            self._call.cancel()
            await cancel_and_wait(self._writing)
            for call in list(self._calls.values()):
                call.end(grpc.StatusCode.UNAVAILABLE, problem, b"")

    async def _write(self) -> None:
        # The reading task finds out that the call has ended, and why.
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            await self._outbox.run()

    async def drain(self) -> None:
        """Take no new stream; end the call when the last stream has ended."""
        self.up = False
        await self._idle.wait()
        self._call.cancel()

    def close(self) -> None:
        """End at once; running streams are cancelled."""
        self.up = False
        for call in list(self._calls.values()):
            call.cancel()
        self._call.cancel()

    # Called by CarriedCall.

    def send_credit(self, stream: int, taken_bytes: int) -> None:
        self._credits[stream] = self._credits.get(stream, 0) + taken_bytes
        self._outbox.notify()

    def send_cancel(self, stream: int) -> None:
        self._credits.pop(stream, None)
        self._cancelled.append(stream)
        self._outbox.notify()

    def forget(self, stream: int) -> None:
        self._calls.pop(stream, None)
        self._credits.pop(stream, None)
        if not self._calls:
            self._idle.set()

    def _collect(self) -> bytes | None:
        if not (self._opened or self._credits or self._cancelled):
            return None
        frames = engine_pb2.RunFrames()
        size = count = 0
        for opening in self._opened:
            size += len(opening.request)
            if count and size > BATCH_BYTES:
                break
            count += 1
        frames.opened.extend(self._opened[:count])
        del self._opened[:count]
        frames.credited.extend(self._credits.keys())
        frames.credits.extend(self._credits.values())
        self._credits.clear()
        if not self._opened:  # a stream must not be cancelled before it is opened
            frames.cancelled.extend(self._cancelled)
            self._cancelled.clear()
        return frames.SerializeToString()

    def _dispatch(self, frames: engine_pb2.AnswerFrames) -> None:
        calls = self._calls
        for greeting in frames.greeted:
            if (call := calls.get(greeting.stream)) is not None:
                call.set_metadata([(header.key, header.value) for header in greeting.metadata])
        for stream, message in zip(frames.streams, frames.messages, strict=True):
            call = calls.get(stream)
            if call is not None:
                call.feed(message)
        for ending in frames.ended:
            if (call := calls.get(ending.stream)) is not None:
                code = _STATUSES.get(ending.code, grpc.StatusCode.UNKNOWN)
                call.end(code, ending.message, ending.details)


async def open_carrier(call: Any) -> Carrier:
    """Make a carrier and wait until it is up.

    Raises:
        grpc.RpcError: the call failed; UNIMPLEMENTED if the other side serves no RunMany.
        ConnectionError: the call ended without a message.
    """
    carrier = Carrier(call)
    try:
        await carrier.wait_up()
    except BaseException:
        with contextlib.suppress(Exception):
            call.cancel()
        raise
    return carrier
