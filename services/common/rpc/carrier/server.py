"""The answering side of RunMany: each stream runs in a task of its own, as Run would have it."""

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any, NoReturn

import grpc

from inferfleet_proto.internal.v1 import engine_pb2
from services.common import errors, rpc
from services.common.rpc.carrier.outbox import BATCH_BYTES, Outbox
from services.common.tasks import cancel_and_wait

Pairs = Sequence[tuple[str, Any]]
_OK = grpc.StatusCode.OK
# Of whatever else goes with it in one message of the call.
_ENDS = 128
_LONGEST_BYTES = rpc.MAX_RECEIVE_BYTES - BATCH_BYTES - 2 * _ENDS * errors.MAX_DETAILS_BYTES


class RunMany:
    """A handler of RunMany: `await` it with the requests and the context of the call.

    Args:
        run: the handler of Run; a generator, or a coroutine that writes by itself.
        parse: a request's deserialiser.
        serialise: of what `run` yields; None for bytes.
    """

    def __init__(
        self,
        run: Callable[[Any, Any], Any],
        *,
        parse: Callable[[bytes], Any],
        serialise: Callable[[Any], bytes] | None = None,
    ) -> None:
        self.run = run
        self.parse = parse
        self.serialise = serialise
        self._open: set[_Conversation] = set()

    async def __call__(self, requests: AsyncIterator[Any], context: Any) -> None:
        conversation = _Conversation(self, context)
        self._open.add(conversation)
        try:
            await conversation.hold(requests)
        finally:
            self._open.discard(conversation)

    async def close(self, patience_s: float) -> None:
        """End each call once its streams have ended and all is told, or `patience_s` is over."""
        open_now = list(self._open)
        for conversation in open_now:
            conversation.close()
        if open_now:
            waits = [asyncio.ensure_future(c.gone.wait()) for c in open_now]
            _, left = await asyncio.wait(waits, timeout=patience_s)
            for wait in left:
                wait.cancel()


class CarriedContext:
    """The part of a grpc.aio.ServicerContext that handlers of Run use."""

    def __init__(
        self, conversation: "_Conversation", opening: engine_pb2.Opening, peer: str
    ) -> None:
        self._conversation = conversation
        self._stream = opening.stream
        self._metadata = tuple((header.key, header.value) for header in opening.metadata)
        self._loop = asyncio.get_running_loop()
        self._until = self._loop.time() + opening.timeout_s if opening.timeout_s else None
        self._credit = opening.window_bytes
        self._credited: asyncio.Future[None] | None = None
        self._peer = peer
        self._callbacks: list[Callable[[Any], None]] = []
        self._serialise = conversation.handler.serialise
        self.ending: tuple[grpc.StatusCode, str, bytes] | None = None
        """How the handler has ended it by itself."""
        self.over = False

    def invocation_metadata(self) -> Pairs:
        return self._metadata

    def time_remaining(self) -> float | None:
        return None if self._until is None else max(self._until - self._loop.time(), 0.0)

    def peer(self) -> str:
        return self._peer

    def cancelled(self) -> bool:
        return self.over

    def done(self) -> bool:
        return self.over

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._callbacks.append(callback)

    async def send_initial_metadata(self, pairs: Pairs) -> None:
        self._conversation.greet(self._stream, pairs)

    async def write(self, message: Any) -> None:
        """Returns when the reader is ready for the next one.

        Raises:
            ResourceExhaustedError: too long to be sent; by itself it would be refused as well.
        """
        if self.over:
            raise asyncio.CancelledError
        raw = message if self._serialise is None else self._serialise(message)
        if len(raw) > _LONGEST_BYTES:
            raise errors.ResourceExhaustedError(
                f"a message of {len(raw)} bytes is longer than {_LONGEST_BYTES}",
                reason="MESSAGE_TOO_LONG",
            )
        self._conversation.send(self._stream, raw)
        self._credit -= len(raw)
        while self._credit <= 0:
            self._credited = self._loop.create_future()
            await self._credited

    async def drained(self) -> None:
        """See the function of this name."""
        if self._conversation.outbox.busy:
            await self._conversation.outbox.collected()

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailers: Pairs = ()
    ) -> NoReturn:
        self.ending = code, details, dict(trailers).get(errors.DETAILS_KEY, b"")
        raise grpc.aio.AbortError

    def credit(self, taken: int) -> None:
        """The reader has taken so many bytes."""
        self._credit += taken
        waiting, self._credited = self._credited, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    def finish(self) -> None:
        """The stream is over; idempotent."""
        if not self.over:
            self.over = True
            for callback in self._callbacks:
                callback(self)


async def drained(context: Any) -> None:
    """Wait until what a handler of Run has written is on its way.

    For whoever produces: it can join what comes meanwhile. In a call of its own `write` has waited.
    """
    if isinstance(context, CarriedContext):
        await context.drained()


class _Conversation:
    """One RunMany call."""

    def __init__(self, handler: RunMany, context: Any) -> None:
        self.handler = handler
        self.outbox = Outbox(self._collect, context.write)
        self.gone = asyncio.Event()
        self._peer = context.peer()
        self._running: dict[int, tuple[CarriedContext, asyncio.Task[None]]] = {}
        self._messages: deque[tuple[int, bytes]] = deque()
        self._greeted: list[engine_pb2.Greeting] = []
        self._ended: list[engine_pb2.Ending] = []
        self._first = True
        self._last_call = False
        self._empty = asyncio.Event()

    async def hold(self, requests: AsyncIterator[engine_pb2.RunFrames]) -> None:
        """The call from its begin to its end."""
        self.outbox.notify()
        reading = asyncio.create_task(self._read(requests), name="carrier reads")
        writing = asyncio.create_task(self.outbox.run(), name="carrier writes")
        empty = asyncio.create_task(self._wait_empty())
        try:
            await asyncio.wait({writing, empty}, return_when=asyncio.FIRST_COMPLETED)
            if not writing.done():
                self.outbox.finish()
                await asyncio.wait({writing})
            writing.result()
            if reading.done():
                reading.result()
        finally:
            for context, task in list(self._running.values()):
                context.finish()
                task.cancel()
            tasks = [task for _, task in self._running.values()]
            for task in (reading, writing, empty, *tasks):
                await cancel_and_wait(task)
            self.gone.set()

    def close(self) -> None:
        """End when nothing runs here any more."""
        self._last_call = True
        self._look()

    def greet(self, stream: int, pairs: Pairs) -> None:
        greeting = engine_pb2.Greeting(stream=stream)
        for key, value in pairs:
            greeting.metadata.add(key=key, value=value)
        self._greeted.append(greeting)
        self.outbox.notify()

    def send(self, stream: int, message: bytes) -> None:
        self._messages.append((stream, message))
        self.outbox.notify()

    async def _read(self, requests: AsyncIterator[engine_pb2.RunFrames]) -> None:
        try:
            async for frames in requests:
                for opening in frames.opened:
                    self._begin(opening)
                for stream, taken in zip(frames.credited, frames.credits, strict=True):
                    if (running := self._running.get(stream)) is not None:
                        running[0].credit(taken)
                for stream in frames.cancelled:
                    self._stop(stream, None)
        finally:
            self.close()

    def _begin(self, opening: engine_pb2.Opening) -> None:
        context = CarriedContext(self, opening, self._peer)
        task = asyncio.create_task(self._serve(opening, context), name="carried run")
        self._running[opening.stream] = context, task
        if opening.timeout_s:
            late = grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", b""
            loop = asyncio.get_running_loop()
            timer = loop.call_later(opening.timeout_s, self._stop, opening.stream, late)
            context.add_done_callback(lambda _: timer.cancel())
        task.add_done_callback(lambda done: self._over(opening.stream, context, done))

    def _stop(self, stream: int, ending: tuple[grpc.StatusCode, str, bytes] | None) -> None:
        if (running := self._running.get(stream)) is not None:
            context, task = running
            context.ending = ending
            context.finish()
            task.cancel()

    async def _serve(self, opening: engine_pb2.Opening, context: CarriedContext) -> None:
        request = rpc.parsed(opening.request, self.handler.parse)
        answers = self.handler.run(request, context)
        if inspect.isawaitable(answers):
            await answers
        elif isinstance(answers, AsyncGenerator):
            async with aclosing(answers):
                async for message in answers:
                    await context.write(message)

    def _over(self, stream: int, context: CarriedContext, task: "asyncio.Task[None]") -> None:
        """After the task's end, which may come before its begin."""
        self._running.pop(stream, None)
        told = _ending_of(task)
        code, text, details = context.ending or told
        self._ended.append(
            engine_pb2.Ending(stream=stream, code=code.value[0], message=text, details=details)
        )
        context.finish()
        self.outbox.notify()
        self._look()

    async def _wait_empty(self) -> None:
        await self._empty.wait()

    def _look(self) -> None:
        if self._last_call and not self._running:
            self._empty.set()

    def _collect(self) -> engine_pb2.AnswerFrames | None:
        if not (self._messages or self._greeted or self._ended or self._first):
            return None
        self._first = False
        frames = engine_pb2.AnswerFrames(greeted=self._greeted)
        self._greeted.clear()
        streams, messages, size, waiting = [], [], 0, self._messages
        while waiting and size < BATCH_BYTES:
            stream, message = waiting.popleft()
            streams.append(stream)
            messages.append(message)
            size += len(message)
        frames.streams.extend(streams)
        frames.messages.extend(messages)
        if not waiting:  # a stream's end comes after its messages
            frames.ended.extend(self._ended[:_ENDS])
            del self._ended[:_ENDS]
        return frames


def _ending_of(task: "asyncio.Task[None]") -> tuple[grpc.StatusCode, str, bytes]:
    if task.cancelled():
        return grpc.StatusCode.CANCELLED, "", b""
    error = task.exception()
    if error is None:
        return _OK, "", b""
    if isinstance(error, grpc.aio.AbortError) or not isinstance(error, Exception):
        return grpc.StatusCode.CANCELLED, "", b""
    told = rpc.told_as(error, "Run")
    return told.code, told.message[:1024], errors.status_of(told).SerializeToString()
