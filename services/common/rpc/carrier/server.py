"""The answering side of RunMany: runs the handler of Run for each stream, in a task of its own."""

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import grpc

from inferfleet_proto.internal.v1 import engine_pb2
from services.common import errors, rpc
from services.common.rpc.carrier.context import MAX_ENDINGS, CarriedContext, Ending
from services.common.rpc.carrier.outbox import BATCH_BYTES, Outbox
from services.common.rpc.carrier.surface import Pairs, RunContext
from services.common.tasks import cancel_and_wait

_DEADLINE_EXCEEDED = Ending(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
_CANCELLED = Ending(grpc.StatusCode.CANCELLED)


class RunMany:
    """A handler of RunMany: `await` it with the requests and the context of the call.

    Args:
        run: the handler of Run: an async generator, or a coroutine that calls `context.write`.
        parse: deserialises a request.
        serialise: serialises what `run` yields; None if that is bytes.
    """

    def __init__(
        self,
        run: Callable[[Any, RunContext], Any],
        *,
        parse: Callable[[bytes], Any],
        serialise: Callable[[Any], bytes] | None = None,
    ) -> None:
        self.run = run
        self.parse = parse
        self.serialise = serialise
        self._open: set[_RunManyCall] = set()

    async def __call__(self, requests: AsyncIterator[Any], context: Any) -> None:
        call = _RunManyCall(self, context)
        self._open.add(call)
        try:
            await call.serve(requests)
        finally:
            self._open.discard(call)

    async def close(self, patience_s: float) -> None:
        """End each call once its streams have ended and their statuses are sent.

        Args:
            patience_s: return after this time in any case.
        """
        open_now = list(self._open)
        for call in open_now:
            call.close()
        if open_now:
            waits = [asyncio.ensure_future(call.gone.wait()) for call in open_now]
            _, left = await asyncio.wait(waits, timeout=patience_s)
            for wait in left:
                wait.cancel()


class _RunManyCall:
    """One RunMany call."""

    def __init__(self, handler: RunMany, context: Any) -> None:
        self.outbox = Outbox(self._collect, context.write)
        self.gone = asyncio.Event()
        self._handler = handler
        self._peer = context.peer()
        self._running: dict[int, tuple[CarriedContext, asyncio.Task[None]]] = {}
        self._messages: deque[tuple[int, bytes]] = deque()
        self._greeted: list[engine_pb2.Greeting] = []
        self._ended: list[engine_pb2.Ending] = []
        self._announced = False
        self._closing = False
        self._empty = asyncio.Event()

    async def serve(self, requests: AsyncIterator[engine_pb2.RunFrames]) -> None:
        """Serve the call from its beginning to its end."""
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
            running = list(self._running.values())
            for context, _ in running:
                context.finish()
            await cancel_and_wait(reading, writing, empty, *(task for _, task in running))
            self.gone.set()

    def close(self) -> None:
        """End the call as soon as no stream runs."""
        self._closing = True
        self._check_empty()

    def send_metadata(self, stream: int, pairs: Pairs) -> None:
        greeting = engine_pb2.Greeting(stream=stream)
        for key, value in pairs:
            greeting.metadata.add(key=key, value=value)
        self._greeted.append(greeting)
        self.outbox.notify()

    def send_message(self, stream: int, message: bytes) -> None:
        self._messages.append((stream, message))
        self.outbox.notify()

    async def _read(self, requests: AsyncIterator[engine_pb2.RunFrames]) -> None:
        try:
            async for frames in requests:
                for opening in frames.opened:
                    self._begin_stream(opening)
                for stream, taken in zip(frames.credited, frames.credits, strict=True):
                    if (running := self._running.get(stream)) is not None:
                        running[0].add_credit(taken)
                for stream in frames.cancelled:
                    self._stop_stream(stream, None)
        finally:
            self.close()

    def _begin_stream(self, opening: engine_pb2.Opening) -> None:
        context = CarriedContext(self, opening, serialise=self._handler.serialise, peer=self._peer)
        task = asyncio.create_task(self._run_handler(opening, context), name="carried run")
        self._running[opening.stream] = context, task
        if opening.timeout_s:
            timer = asyncio.get_running_loop().call_later(
                opening.timeout_s, self._stop_stream, opening.stream, _DEADLINE_EXCEEDED
            )
            context.add_done_callback(lambda _: timer.cancel())
        task.add_done_callback(lambda done: self._end_stream(opening.stream, context, done))

    def _stop_stream(self, stream: int, ending: Ending | None) -> None:
        if (running := self._running.get(stream)) is not None:
            context, task = running
            context.ending = ending
            context.finish()
            task.cancel()

    async def _run_handler(self, opening: engine_pb2.Opening, context: CarriedContext) -> None:
        request = rpc.parse_message(opening.request, self._handler.parse)
        answers = self._handler.run(request, context)
        if inspect.isawaitable(answers):
            await answers
        elif isinstance(answers, AsyncGenerator):
            async with aclosing(answers):
                async for message in answers:
                    await context.write(message)

    def _end_stream(self, stream: int, context: CarriedContext, task: "asyncio.Task[None]") -> None:
        """Send the status of a stream whose task has ended, possibly before it ran at all."""
        self._running.pop(stream, None)
        own = _ending_of(task)  # also marks the task's error as retrieved
        code, text, details = context.ending or own
        self._ended.append(
            engine_pb2.Ending(stream=stream, code=code.value[0], message=text, details=details)
        )
        context.finish()
        self.outbox.notify()
        self._check_empty()

    async def _wait_empty(self) -> None:
        await self._empty.wait()

    def _check_empty(self) -> None:
        if self._closing and not self._running:
            self._empty.set()

    def _collect(self) -> engine_pb2.AnswerFrames | None:
        # The first message goes out without frames: it shows the caller that RunMany is served.
        if self._announced and not (self._messages or self._greeted or self._ended):
            return None
        self._announced = True
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
        if not waiting:  # a stream's status comes after its messages
            frames.ended.extend(self._ended[:MAX_ENDINGS])
            del self._ended[:MAX_ENDINGS]
        return frames


def _ending_of(task: "asyncio.Task[None]") -> Ending:
    if task.cancelled():
        return _CANCELLED
    error = task.exception()
    if error is None:
        return Ending(grpc.StatusCode.OK)
    if isinstance(error, grpc.aio.AbortError) or not isinstance(error, Exception):
        return _CANCELLED
    fleet_error = rpc.fleet_error_of(error, "Run")
    details = errors.status_of(fleet_error).SerializeToString()
    return Ending(fleet_error.code, fleet_error.message[: errors.MAX_MESSAGE_CHARS], details)
