"""A balancer that finds fake engines and a fake prefix index on real sockets."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from inferfleet_proto.admin.v1 import fleet_pb2_grpc
from inferfleet_proto.internal.v1 import engine_pb2, engine_pb2_grpc, prefix_index_pb2_grpc
from inferfleet_proto.v1 import inference_pb2
from services.balancer.config import BalancerConfig
from services.balancer.service import BalancerService
from services.common import errors, rpc
from services.common.service.telemetry import Telemetry
from tests.doubles.fake_engine import MODEL, FakeEngine
from tests.doubles.prefix_index import FakePrefixIndex
from tests.doubles.registry import FakeRegistry
from tests.doubles.scripts import stream_of


async def until(condition: Callable[[], bool], what: str, limit_s: float = 20.0) -> None:
    """Wait for a condition, with a generous limit."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"not within {limit_s} s: {what}"
        await asyncio.sleep(0.01)


class Fleet:
    """A balancer and its fakes."""

    def __init__(self, **config: Any) -> None:
        self.keys = FakeRegistry()
        self.index = FakePrefixIndex()
        self.engines: list[FakeEngine] = []
        self.spans = InMemorySpanExporter()
        self.config = config
        self.service: Any = None
        self._index_server = rpc.make_server()
        self._channels: list[grpc.aio.Channel] = []

    async def start(self) -> None:
        prefix_index_pb2_grpc.add_PrefixIndexServicer_to_server(self.index, self._index_server)
        port = self._index_server.add_insecure_port("127.0.0.1:0")
        await self._index_server.start()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.spans))
        keys = {"kvcache": f"127.0.0.1:{port}", "match_timeout_s": 2.0, **self.config}
        self.service = BalancerService(BalancerConfig(**keys), Telemetry(provider), self.keys)
        await self.service.start()

    async def stop(self) -> None:
        for channel in self._channels:
            await channel.close()
        await self.service.stop()
        for engine in self.engines:
            await engine.stop()
        await self._index_server.stop(0)

    async def add(
        self, engine_id: str, membership: rpc.Membership | None = None, **info: Any
    ) -> FakeEngine:
        engine = FakeEngine(engine_id, **info)
        self.engines.append(engine)
        await engine.start(membership)
        await self.keys.register(engine)
        await until(lambda: self._serves(engine), f"{engine_id} serves")
        return engine

    def _serves(self, engine: FakeEngine) -> bool:
        """Whether the balancer can ask it, and not one that had its name before."""
        member = self.member(engine.info.engine_id)
        if member is None or member.info.epoch_ms != engine.info.epoch_ms:
            return False
        serving = member.state(time.monotonic()).value == "serving"
        return serving and (member.link.carries or not engine.serves_many)

    @property
    def admission(self) -> Any:
        return self.service.dependencies.admission

    def member(self, engine_id: str) -> Any:
        """The engine in the balancer's registry, or None."""
        return self.service.dependencies.registry.member(engine_id)

    def state(self, engine_id: str) -> str:
        member = self.member(engine_id)
        return "gone" if member is None else member.state(time.monotonic()).value

    async def until_state(self, engine_id: str, state: str) -> None:
        await until(lambda: self.state(engine_id) == state, f"{engine_id} {state}")

    def in_flight(self) -> int:
        return sum(member.in_flight for member in self.service.dependencies.registry.members())

    async def until_idle(self) -> None:
        """Every count returns to zero: nothing in flight, no slot reserved, no tenant active."""
        admission = self.admission
        await until(
            lambda: not (self.in_flight() or admission.reserved_slots or admission.counters.active),
            "idle",
        )
        assert not any(admission.queued().values())

    def metric(self, name: str, **labels: str) -> float:
        value = self.service.dependencies.metrics.registry.get_sample_value(name, labels)
        return 0.0 if value is None else value

    def admin(self) -> Any:
        channel = grpc.aio.insecure_channel(self.service.admin_address)
        self._channels.append(channel)
        return fleet_pb2_grpc.FleetStub(channel)

    def run(self, request: engine_pb2.EngineRequest, **arguments: Any) -> Any:
        """A raw call to the balancer."""
        channel = grpc.aio.insecure_channel(self.service.address)
        self._channels.append(channel)
        return engine_pb2_grpc.EngineStub(channel).Run(request, **arguments)

    async def ask(self, request: engine_pb2.EngineRequest, **arguments: Any) -> list[Any]:
        """All messages of a stream; raises the FleetError it ends with."""
        try:
            return [message async for message in self.run(request, **arguments)]
        except grpc.RpcError as error:
            raise errors.error_of(error) from error


def make_request(**changes: Any) -> engine_pb2.EngineRequest:
    """A request as a gateway sends it."""
    facts = {"request_id": "r1", "prompt": list(range(20)), "max_tokens": 4, "seed": 7, "n": 1}
    facts.update({"tenant": "", "model": MODEL, "session_id": "", "priority": 0, "bypass": False})
    facts.update(changes)
    return engine_pb2.EngineRequest(
        tenant=facts["tenant"],
        request=inference_pb2.GenerateRequest(
            model=facts["model"],
            request_id=facts["request_id"],
            token_ids=inference_pb2.TokenIds(ids=facts["prompt"]),
            sampling=inference_pb2.SamplingParams(seed=facts["seed"], n=facts["n"]),
            stop=inference_pb2.StopParams(max_tokens=facts["max_tokens"]),
            cache=inference_pb2.CacheOptions(bypass=facts["bypass"]),
            routing=inference_pb2.RoutingHints(
                session_id=facts["session_id"], priority=facts["priority"]
            ),
        ),
    )


def summed(messages: list[Any]) -> dict[str, Any]:
    """A stream as its client sees it, wherever it was cut."""
    seen: dict[str, Any] = {"started": 0, "text": {}, "ids": {}, "finished": {}, "summaries": 0}
    for message in messages:
        event = message.WhichOneof("event")
        assert not seen["summaries"], "a message after the Summary"
        if event == "started":
            seen["started"] += 1
        elif event == "delta":
            choice = message.delta.choice
            assert choice not in seen["finished"], "a delta after its choice's end"
            seen["text"][choice] = seen["text"].get(choice, "") + message.delta.text
            seen["ids"].setdefault(choice, []).extend(message.delta.token_ids)
        elif event == "finished":
            assert message.finished.choice not in seen["finished"], "finished twice"
            seen["finished"][message.finished.choice] = message.finished.reason
        else:
            seen["summaries"] += 1
            seen["completion_tokens"] = message.summary.usage.completion_tokens
    return seen


class EngineProcess:
    """A fake engine in a process of its own."""

    def __init__(self, engine_id: str, *flags: str) -> None:
        command = [sys.executable, "-m", "tests.doubles.fake_engine"]
        command += ["--engine-id", engine_id, *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.info = json_format.ParseDict(
            json.loads(self.process.stdout.readline()), engine_pb2.EngineInfo()
        )

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
async def fleet(request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    """A running balancer without engines; configure with @pytest.mark.parametrize(indirect)."""
    made = Fleet(**getattr(request, "param", {}))
    await made.start()
    yield made
    await made.stop()


@pytest.fixture
async def make_fleet() -> AsyncIterator[Callable[..., Any]]:
    """Starts balancers with the configuration given."""
    made: list[Fleet] = []

    async def make(**config: Any) -> Fleet:
        made.append(Fleet(**config))
        await made[-1].start()
        return made[-1]

    yield make
    for fleet in made:
        await fleet.stop()


@pytest.fixture
def engine_request() -> Callable[..., engine_pb2.EngineRequest]:
    """Makes requests as a gateway sends them."""
    return make_request


@pytest.fixture
def as_seen() -> Callable[[list[Any]], dict[str, Any]]:
    """Sums a stream up as its client sees it."""
    return summed


@pytest.fixture
def wait_until() -> Any:
    """Waits for a condition."""
    return until


@pytest.fixture
def undisturbed() -> Callable[[engine_pb2.EngineRequest], dict[str, Any]]:
    """What a client sees of a run that nothing disturbs."""
    return lambda request: summed(list(stream_of(request, engine_pb2.EngineInfo(engine_id="x"))))


@pytest.fixture
def start_engine_process() -> Iterator[Callable[..., EngineProcess]]:
    """Starts fake engines in processes; all are killed at the end."""
    started: list[EngineProcess] = []

    def start(engine_id: str, *flags: str) -> EngineProcess:
        started.append(EngineProcess(engine_id, *flags))
        return started[-1]

    yield start
    for process in started:
        process.end()
