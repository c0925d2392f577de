"""The exchanges of one HTTP body: usually one, or several prompts side by side."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace

from inferfleet_proto.v1 import inference_pb2
from services.gateway.callers.quota.fit import Need
from services.gateway.callers.quota.quotas import tokens_wanted
from services.gateway.models.catalog import ModelView
from services.gateway.request.collect import Collector
from services.gateway.request.exchange import Caller, Exchange, Rooms

# Prompts that nobody reads yet wait here; their streams then wait too.
QUEUED_MESSAGES = 64


class Group:
    """Runs one exchange per prompt; the first failure ends all."""

    def __init__(
        self, rooms: Rooms, requests: Sequence[inference_pb2.GenerateRequest], caller: Caller
    ) -> None:
        self.request_id = caller.request_id
        need = Need(len(requests), sum(map(tokens_wanted, requests)))
        caller = replace(caller, together=need)
        self._exchanges = [
            Exchange(rooms, request, _numbered(caller, index, len(requests)))
            for index, request in enumerate(requests)
        ]
        self.trace_id = self._exchanges[0].trace_id
        if len(requests) == 1:
            self.request_id = self._exchanges[0].request_id

    @property
    def engine_id(self) -> str:
        """The engines, in the prompts' order, each once."""
        return ",".join(dict.fromkeys(e.engine_id for e in self._exchanges if e.engine_id))

    @property
    def rate_headers(self) -> Mapping[str, str]:
        """x-ratelimit-* of the prompt admitted last."""
        return self._exchanges[-1].rate_headers

    @property
    def model(self) -> ModelView:
        """Only once the first event is here."""
        return next(e.admitted.model for e in self._exchanges if e.is_open)

    @property
    def revision(self) -> str:
        """Of the first prompt that was answered; only once the first event is here."""
        return next((e.revision for e in self._exchanges if e.revision), self.model.revision)

    async def events(self) -> AsyncGenerator[tuple[int, bytes], None]:
        """(prompt, serialised GenerateResponse), as they come."""
        if len(self._exchanges) == 1:
            exchange = self._exchanges[0]
            async with exchange, aclosing(exchange.messages()) as messages:
                async for raw in messages:
                    yield 0, raw
            return
        queue: asyncio.Queue[tuple[int, bytes] | BaseException | None] = asyncio.Queue(
            QUEUED_MESSAGES
        )
        tasks = [
            asyncio.create_task(_pump(index, exchange, queue))
            for index, exchange in enumerate(self._exchanges)
        ]
        try:
            left = len(tasks)
            while left:
                item = await queue.get()
                if item is None:
                    left -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for exchange in self._exchanges:
                exchange.abandon()  # one whose task never ran still holds its span

    async def collected(
        self, events: AsyncGenerator[tuple[int, bytes], None]
    ) -> list[inference_pb2.CompleteResponse]:
        """One whole answer per prompt."""
        collectors = [Collector() for _ in self._exchanges]
        async for prompt, raw in events:
            collectors[prompt].add(raw)
        return [collector.answer() for collector in collectors]


async def _pump(
    index: int,
    exchange: Exchange,
    queue: "asyncio.Queue[tuple[int, bytes] | BaseException | None]",
) -> None:
    try:
        async with exchange, aclosing(exchange.messages()) as messages:
            async for raw in messages:
                await queue.put((index, raw))
    except Exception as error:  # handed to the reader, who raises it
        await queue.put(error)
    else:
        await queue.put(None)


def _numbered(caller: Caller, index: int, count: int) -> Caller:
    if count == 1:
        return caller
    return replace(caller, request_id=f"{caller.request_id}-{index}")
