"""A real gateway in this process in front of fake engines."""

import asyncio
import contextlib
import json
import logging
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from inferfleet_proto.v1 import inference_pb2_grpc
from services.common.service import telemetry
from services.gateway.config import GatewayConfig
from services.gateway.service import GatewayService
from tests.doubles.fake_engine import FakeEngine
from tests.doubles.scripts import EOS, say_hello


def text_engine() -> FakeEngine:
    """A fake engine that answers with `reply`; its tokenizer has one token per byte."""
    return FakeEngine(
        script=say_hello,
        epoch_ms=1_790_000_000_000,
        model_revision="sha256:weights",
        max_model_len=256,
        eos_token_ids=[EOS],
        numerics_id="numerics-1",
        deterministic=False,
    )


@dataclass(frozen=True)
class Running:
    """A started gateway and the addresses on which it listens."""

    service: GatewayService
    address: str
    http: str
    metrics: str
    spans: InMemorySpanExporter

    def stub(self, channel: grpc.aio.Channel) -> Any:
        """A stub of the public service."""
        return inference_pb2_grpc.InferenceStub(channel)


@contextlib.asynccontextmanager
async def running_gateway(
    *engines: FakeEngine, carried: bool = True, **keys: Any
) -> AsyncIterator[Running]:
    """Run a gateway in front of some engines.

    Args:
        carried: wait until the carriers to the engines are open.
        keys: configuration keys of the gateway.
    """
    addresses = tuple(engine.address for engine in engines)
    with tempfile.TemporaryDirectory() as folder:
        ready_file = Path(folder) / "ready"
        config = GatewayConfig(
            port=0,
            http_port=0,
            engines=addresses,
            balancers=addresses,
            ready_file=str(ready_file),
            drain_grace_s=5.0,
            connect_retry_s=0.5,
            log_level="error",
        )
        config = replace(config, **keys)
        spans = InMemorySpanExporter()
        root = logging.getLogger()
        handlers, level = root.handlers[:], root.level
        opened = telemetry.setup(
            "gateway", otlp_endpoint="", log_level=config.log_level, exporter=spans
        )
        service = GatewayService(config, opened)
        try:
            await service.start()
            if carried:
                await asyncio.wait_for(service.wait_carried(), 10)
            ready = json.loads(await asyncio.to_thread(ready_file.read_text))
            yield Running(
                service, ready["address"], ready["http_address"], ready["metrics_address"], spans
            )
        finally:
            await service.stop()
            await asyncio.to_thread(opened.close)
            root.handlers[:] = handlers
            root.setLevel(level)


def sse_events(body: str) -> list[Any]:
    """The payloads of a whole event stream: JSON values, and "[DONE]" as it is.

    Raises:
        ValueError: the body has something that is not a data event.
    """
    payloads = []
    for block in body.split("\n\n")[:-1]:
        if not block.startswith("data: "):
            raise ValueError(f"not a data event: {block!r}")
        payload = block.removeprefix("data: ")
        payloads.append(payload if payload == "[DONE]" else json.loads(payload))
    return payloads
