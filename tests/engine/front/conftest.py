"""A front without a model: a core that says what the test tells it, real gRPC sockets before it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from inferfleet_proto.internal.v1 import engine_pb2, engine_pb2_grpc
from inferfleet_proto.v1 import inference_pb2, inference_pb2_grpc
from services.common import rpc
from services.common.service.telemetry import Telemetry
from services.engine.contract.core_link import CoreDiedError
from services.engine.contract.messages import AddRequest, ChoiceOutput, CoreReady, Load, RoundReport
from services.engine.contract.runner import RunnerInfo
from services.engine.front.config import FrontConfig
from services.engine.front.service import EngineService


class ScriptedCore:
    """Records what the front sends; `say` is one round. `answer`, if set, replies to each request
    at once with its tokens."""

    def __init__(self, max_model_len: int = 64) -> None:
        self.received: list[Any] = []
        self.answer: Callable[[AddRequest], list[ChoiceOutput]] | None = None
        self.config: Any = None
        self._max_model_len = max_model_len
        self._reports: asyncio.Queue[RoundReport | str | None] = asyncio.Queue()
        self._news = asyncio.Event()

    async def start(self, config: Any) -> CoreReady:
        self.config = config
        return CoreReady(
            info=RunnerInfo(
                model="tiny",
                model_revision="sha256:0123",
                numerics_id="fake/1",
                kv_layout="fake",
                vocab_size=259,
                max_model_len=self._max_model_len,
                eos_token_ids=(258,),
                kv_bytes_per_block=1,
                weights_bytes=1,
                load_s=0.1,
            ),
            hash_namespace=b"n" * 32,
            block_size=4,
            num_blocks=32,
            max_model_len=self._max_model_len,
            kv_bytes=1,
            max_num_seqs=config.max_num_seqs,
        )

    def send(self, messages: Any) -> None:
        self.received.extend(messages)
        self._news.set()
        for message in messages:
            if self.answer is not None and isinstance(message, AddRequest):
                self.say(*self.answer(message))

    async def __aiter__(self) -> AsyncIterator[RoundReport]:
        while (item := await self._reports.get()) is not None:
            if isinstance(item, str):
                raise CoreDiedError(item)
            yield item

    async def stop(self) -> None:
        self._reports.put_nowait(None)

    def say(self, *outputs: ChoiceOutput, load: Load | None = None, **parts: Any) -> None:
        report = RoundReport(step=0, outputs=list(outputs), load=load or Load(), **parts)
        self._reports.put_nowait(report)

    def die(self, reason: str) -> None:
        self._reports.put_nowait(reason)

    async def got(self, kind: type, count: int = 1) -> Any:
        """The `count`-th message of a kind, once it is here."""
        async with asyncio.timeout(20):
            while True:
                found = [message for message in self.received if isinstance(message, kind)]
                if len(found) >= count:
                    return found[count - 1]
                self._news.clear()
                await self._news.wait()


class SpanSink(InMemorySpanExporter):
    """Keeps spans and tells of them."""

    def __init__(self) -> None:
        super().__init__()
        self._news = asyncio.Event()

    def export(self, spans: Any) -> Any:
        outcome = super().export(spans)
        self._news.set()
        return outcome

    async def by_name(self, count: int) -> dict[str, Any]:
        """The finished spans once there are `count`."""
        async with asyncio.timeout(20):
            while len(spans := self.get_finished_spans()) < count:
                self._news.clear()
                await self._news.wait()
        return {span.name: span for span in spans}


class Harness:
    """One engine server over a scripted core, and clients to it."""

    def __init__(self, server: EngineService, core: Any, spans: SpanSink) -> None:
        self.server = server
        self.core = core
        self.spans = spans
        self.channel = grpc.aio.insecure_channel(
            server.address, options=[("grpc.max_send_message_length", -1)]
        )
        self.engine = engine_pb2_grpc.EngineStub(self.channel)
        self._public: grpc.aio.Channel | None = None

    @property
    def public(self) -> inference_pb2_grpc.InferenceStub:
        if self._public is None:
            self._public = grpc.aio.insecure_channel(self.server.public_address)
        return inference_pb2_grpc.InferenceStub(self._public)

    async def close(self) -> None:
        await self.channel.close()
        if self._public is not None:
            await self._public.close()
        await self.server.stop()


@pytest.fixture
async def start_front() -> AsyncIterator[Callable[..., Any]]:
    """Starts fronts with the given keys; stops them at the end."""
    async with AsyncExitStack() as stack:

        async def start(*, core: Any = None, **keys: Any) -> Harness:
            core = core or ScriptedCore()
            spans = SpanSink()
            provider = TracerProvider(shutdown_on_exit=False)
            provider.add_span_processor(SimpleSpanProcessor(spans))
            keys.setdefault("engine_id", "engine-under-test")
            keys.setdefault("simulate", "yes")
            config = FrontConfig(**keys)
            server = EngineService(config, Telemetry(provider), core)
            stack.push_async_callback(server.stop)  # also if it does not start
            await server.start()
            harness = Harness(server, core, spans)
            stack.push_async_callback(harness.close)
            return harness

        yield start


@pytest.fixture
async def front(start_front: Callable[..., Any]) -> Harness:
    """A front with default keys."""
    return await start_front(public=True)


@pytest.fixture
def scripted_core() -> type[ScriptedCore]:
    return ScriptedCore


@pytest.fixture
def run_request() -> Callable[..., engine_pb2.EngineRequest]:
    """Makes a request of the fleet with a few token ids."""

    def make(
        request_id: str = "r-1", *, ids: list[int] | None = None, attempt: int = 0, **parts: Any
    ) -> engine_pb2.EngineRequest:
        request = inference_pb2.GenerateRequest(
            model="tiny",
            token_ids=inference_pb2.TokenIds(ids=[65, 66, 67] if ids is None else ids),
            request_id=request_id,
            **parts,
        )
        return engine_pb2.EngineRequest(request=request, attempt=attempt)

    return make


@pytest.fixture
def out() -> Callable[..., ChoiceOutput]:
    """Makes an output of the core: text or ids, and perhaps an end."""

    def make(key: str, ids: str | list[int], end: str | None = None, **parts: Any) -> ChoiceOutput:
        token_ids = list(ids.encode()) if isinstance(ids, str) else ids
        parts.setdefault("choice", 0)
        return ChoiceOutput(request_key=key, token_ids=token_ids, finish_reason=end, **parts)

    return make


@pytest.fixture
def token_key() -> str:
    return rpc.TOKEN_KEY
