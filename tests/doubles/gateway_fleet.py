"""A gateway without a fleet behind it: an engine played by a script, for tests and for trying out.

`EngineDouble` serves the Engine contract on a real socket; what its Run streams is a function that
the caller chooses. `running_gateway` starts a real gateway in front of it.
"""

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from inferfleet_proto.internal.v1 import engine_pb2, engine_pb2_grpc
from inferfleet_proto.v1 import inference_pb2, inference_pb2_grpc
from services.common import rpc
from services.common.errors import FleetError
from services.common.rpc.carrier import RunMany
from services.common.text import Tokenizer
from services.common.text.byte_level import byte_assets
from services.gateway.config import GatewayConfig
from services.gateway.service import GatewayService

MODEL = "tiny"
MAX_MODEL_LEN = 256
EOS = 258

Event = inference_pb2.GenerateResponse
Script = Callable[[engine_pb2.EngineRequest, "EngineDouble"], AsyncIterator[Event]]


async def say_hello(
    request: engine_pb2.EngineRequest, double: "EngineDouble"
) -> AsyncIterator[Event]:
    """Answers `double.reply`, one character a delta, up to max_tokens bytes; then its end."""
    asked = request.request
    n = asked.sampling.n if asked.sampling.HasField("n") else 1
    most = asked.stop.max_tokens if asked.stop.HasField("max_tokens") else 10**6
    yield double.started(request)
    total = 0
    for choice in range(n):
        sent = 0
        for character in double.reply:
            ids = list(character.encode())
            if sent + len(ids) > most:
                break
            sent += len(ids)
            yield double.delta(request, choice, character, ids)
        full = sent >= most
        if not full:
            yield double.delta(request, choice, "", [EOS])
        reason = "MAX_TOKENS" if full else "EOS"
        yield Event(finished={"choice": choice, "reason": f"FINISH_REASON_{reason}"})
        total += sent + (not full)
    yield double.summary(request, total)


class EngineDouble(engine_pb2_grpc.EngineServicer):
    """Serves Run by a script, and what a gateway asks an engine about itself."""

    def __init__(self) -> None:
        self.assets = byte_assets()
        self.tokenizer = Tokenizer(self.assets)
        self.reply = "Hé, 🌶!"
        self.script: Script = say_hello
        self.requests: list[engine_pb2.EngineRequest] = []
        self.metadata: list[dict[str, str]] = []
        self.timeouts: list[float | None] = []
        self.engine_id = "engine-1"
        self.revision = "sha256:weights"
        self.max_model_len = MAX_MODEL_LEN
        self.tokenizer_calls = 0
        self.running = 0
        self.cancelled = 0
        self.changed = asyncio.Condition()
        self.address = ""
        self.server: grpc.aio.Server | None = None
        self.many = RunMany(
            self.Run,
            parse=engine_pb2.EngineRequest.FromString,
            serialise=Event.SerializeToString,
        )

    async def start(self, membership: rpc.Membership | None = None) -> None:
        """Listen on a free port, told in `address`."""
        self.server = rpc.make_server()
        engine_pb2_grpc.add_EngineServicer_to_server(self, self.server)
        port = (membership or rpc.Membership()).bind(self.server, "127.0.0.1:0")
        host = "localhost" if membership else "127.0.0.1"  # certificates name hosts
        self.address = f"{host}:{port}"
        await self.server.start()

    async def stop(self) -> None:
        """Cut all streams and close the port."""
        if self.server is not None:
            await self.server.stop(None)

    async def wait_for(self, condition: Callable[[], bool]) -> None:
        """Return once the condition holds; looked at whenever a stream begins or ends."""
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(condition)

    async def RunMany(self, request_iterator: Any, context: Any) -> None:
        await self.many(request_iterator, context)

    async def Run(self, request: engine_pb2.EngineRequest, context: Any) -> AsyncIterator[Event]:
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.timeouts.append(rpc.remaining_s(context))
        await context.send_initial_metadata(((rpc.ENGINE_ID_KEY, self.engine_id),))
        await self._count(1)
        try:
            async for event in self.script(request, self):
                yield event
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        finally:
            await asyncio.shield(self._count(-1))

    async def GetInfo(
        self, request: engine_pb2.GetInfoRequest, context: Any
    ) -> engine_pb2.EngineInfo:
        return engine_pb2.EngineInfo(
            engine_id=self.engine_id,
            epoch_ms=1_790_000_000_000,
            address=self.address,
            model=MODEL,
            model_revision=self.revision,
            max_model_len=self.max_model_len,
            vocab_size=self.tokenizer.vocab_size,
            tokenizer_digest=self.assets.digest,
            eos_token_ids=[EOS],
            numerics_id="numerics-1",
        )

    async def GetTokenizer(
        self, request: engine_pb2.GetTokenizerRequest, context: Any
    ) -> AsyncIterator[engine_pb2.TokenizerChunk]:
        self.tokenizer_calls += 1
        for chunk in self.assets.chunks(2048):
            yield chunk

    def started(self, request: engine_pb2.EngineRequest) -> Event:
        asked = request.request
        started = inference_pb2.Started(
            request_id=asked.request_id,
            model=asked.model,
            model_revision=self.revision,
            prompt_tokens=len(asked.token_ids.ids),
            cached_tokens=3,
            seed=asked.sampling.seed,
            engine_id=self.engine_id,
        )
        if asked.response.prompt_logprobs:
            for position, token_id in enumerate(asked.token_ids.ids):
                entry = started.prompt_logprobs.add(token_id=token_id, token=bytes([token_id]))
                if position:
                    entry.logprob = -1.0
        return Event(started=started)

    def delta(
        self, request: engine_pb2.EngineRequest, choice: int, text: str, ids: list[int]
    ) -> Event:
        delta = inference_pb2.Delta(choice=choice, text=text, token_ids=ids, num_tokens=len(ids))
        if request.request.response.logprobs:
            for token_id in ids:
                token = self.tokenizer.token_bytes(token_id)
                entry = delta.logprobs.add(token_id=token_id, logprob=-0.5, token=token)
                for alternative in range(request.request.response.top_logprobs):
                    entry.top.add(
                        token_id=65 + alternative,
                        logprob=float("-inf") if alternative else -0.5,
                        token=bytes([65 + alternative]),
                    )
        return Event(delta=delta)

    def summary(self, request: engine_pb2.EngineRequest, completion_tokens: int) -> Event:
        usage = inference_pb2.Usage(
            prompt_tokens=len(request.request.token_ids.ids),
            cached_tokens=3,
            completion_tokens=completion_tokens,
        )
        return Event(summary={"usage": usage, "engine_id": self.engine_id, "exact": True})

    async def _count(self, by: int) -> None:
        async with self.changed:
            self.running += by
            self.changed.notify_all()


async def hold_after_first(
    request: engine_pb2.EngineRequest, double: EngineDouble
) -> AsyncIterator[Event]:
    """One character, then silence until cancelled."""
    yield double.started(request)
    yield double.delta(request, 0, "H", [72])
    await asyncio.Event().wait()


def fail_with(error: FleetError, *, after: int = 0) -> Script:
    """`after` characters, then a status."""

    async def script(
        request: engine_pb2.EngineRequest, double: EngineDouble
    ) -> AsyncIterator[Event]:
        if after:
            yield double.started(request)
        for _ in range(after):
            yield double.delta(request, 0, "x", [120])
        raise error

    return script


def sse_events(body: str) -> list[Any]:
    """The payloads of a whole event stream: JSON values, and "[DONE]" as it is.

    Raises:
        ValueError: it is not made of data events.
    """
    payloads = []
    for block in body.split("\n\n")[:-1]:
        if not block.startswith("data: "):
            raise ValueError(f"not a data event: {block!r}")
        payload = block.removeprefix("data: ")
        payloads.append(payload if payload == "[DONE]" else json.loads(payload))
    return payloads


@dataclass(frozen=True)
class Running:
    """A started gateway and where it listens."""

    service: GatewayService
    address: str
    http: str
    metrics: str
    spans: InMemorySpanExporter

    def stub(self, channel: grpc.aio.Channel) -> Any:
        """Of the public service."""
        return inference_pb2_grpc.InferenceStub(channel)


@contextlib.asynccontextmanager
async def running_gateway(
    *engines: EngineDouble, carried: bool = True, **keys: Any
) -> AsyncIterator[Running]:
    """A gateway in this process before some doubles.

    Args:
        carried: wait until requests will share calls to them.
        keys: of its configuration.
    """
    addresses = tuple(engine.address for engine in engines)
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready"
        config = GatewayConfig(
            port=0,
            http_port=0,
            engines=addresses,
            balancers=addresses,
            ready_file=str(ready),
            drain_grace_s=5.0,
            connect_retry_s=0.5,
            log_level="error",
        )
        spans = InMemorySpanExporter()
        service = GatewayService(replace(config, **keys), exporter=spans)
        try:
            await service.start()
            if carried:
                await asyncio.wait_for(service.wait_carried(), 10)
            told = json.loads(await asyncio.to_thread(ready.read_text))
            yield Running(
                service, told["address"], told["http_address"], told["metrics_address"], spans
            )
        finally:
            await service.stop()
