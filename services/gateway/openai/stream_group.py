"""The streams of one HTTP body: usually one, or several prompts side by side."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace

from inferfleet_proto.v1 import inference_pb2
from services.common.answer_collector import AnswerCollector
from services.gateway.callers.quota.fit import Need
from services.gateway.callers.quota.quotas import estimate_tokens
from services.gateway.models.catalog import ModelView
from services.gateway.request.caller import Caller
from services.gateway.request.dependencies import Dependencies
from services.gateway.request.gateway_stream import GatewayStream

# Messages of all prompts that wait for a slow reader; beyond this, their streams wait too.
MAX_QUEUED_MESSAGES = 64

Item = tuple[int, bytes] | BaseException | None
"""A prompt's index and message, the error of a stream, or None at the end of a stream."""


class StreamGroup:
    """Runs one stream per prompt; the first failure ends all."""

    def __init__(
        self,
        dependencies: Dependencies,
        requests: Sequence[inference_pb2.GenerateRequest],
        caller: Caller,
        request_id: str,
    ) -> None:
        need = Need(len(requests), sum(map(estimate_tokens, requests)))
        self._streams = [
            GatewayStream(
                dependencies,
                request,
                replace(
                    caller,
                    body_need=need,
                    request_id=request_id if len(requests) == 1 else f"{request_id}-{index}",
                ),
            )
            for index, request in enumerate(requests)
        ]
        self.trace_id = self._streams[0].trace_id
        self.request_id = self._streams[0].request_id if len(requests) == 1 else request_id

    @property
    def engine_id(self) -> str:
        """The engines in the prompts' order, each once, separated by commas."""
        return ",".join(dict.fromkeys(s.engine_id for s in self._streams if s.engine_id))

    @property
    def rate_headers(self) -> Mapping[str, str]:
        """x-ratelimit-* of the prompt that was admitted last."""
        return self._streams[-1].rate_headers

    @property
    def model(self) -> ModelView:
        """The model; only after the first event."""
        return next(stream.admitted.model for stream in self._streams if stream.is_open)

    @property
    def revision(self) -> str:
        """Of the first prompt that was answered; only after the first event."""
        return next((s.revision for s in self._streams if s.revision), self.model.revision)

    async def events(self) -> AsyncGenerator[tuple[int, bytes], None]:
        """The prompt's index and the serialised GenerateResponse, as they arrive.

        Raises:
            FleetError: of the first stream that failed.
        """
        if len(self._streams) == 1:
            stream = self._streams[0]
            async with stream, aclosing(stream.messages()) as messages:
                async for raw in messages:
                    yield 0, raw
            return
        queue: asyncio.Queue[Item] = asyncio.Queue(MAX_QUEUED_MESSAGES)
        tasks = [
            asyncio.create_task(_queue_messages(index, stream, queue))
            for index, stream in enumerate(self._streams)
        ]
        try:
            running = len(tasks)
            while running:
                item = await queue.get()
                if item is None:
                    running -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for stream in self._streams:
                stream.abandon()  # a stream whose task never ran still holds its span

    async def collect(
        self, events: AsyncGenerator[tuple[int, bytes], None]
    ) -> list[inference_pb2.CompleteResponse]:
        """One whole answer per prompt."""
        collectors = [AnswerCollector() for _ in self._streams]
        async for prompt, raw in events:
            collectors[prompt].add_serialized(raw)
        return [collector.answer() for collector in collectors]


async def _queue_messages(index: int, stream: GatewayStream, queue: "asyncio.Queue[Item]") -> None:
    try:
        async with stream, aclosing(stream.messages()) as messages:
            async for raw in messages:
                await queue.put((index, raw))
    except Exception as error:  # raised by the reader of the queue
        await queue.put(error)
    else:
        await queue.put(None)
