"""Calls at once, and what came of them: messages, tokens, time to the first message."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from statistics import median, quantiles

import grpc

from benchmarks.bench_hops.sources import MODEL
from inferfleet_proto.internal.v1 import engine_pb2
from inferfleet_proto.v1 import inference_pb2
from services.common import rpc

INTERNAL = "/inferfleet.internal.v1.Engine/Run"
PUBLIC = "/inferfleet.v1.Inference/Generate"


@dataclass
class Counts:
    """The measurements of one load."""

    messages: int = 0
    tokens: int = 0
    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    wall_s: float = 0.0

    def row(self) -> dict[str, float]:
        """Figures of it; gaps are between messages of one stream."""
        gaps = quantiles(self.gaps, n=100) if len(self.gaps) > 100 else [0.0] * 99
        return {
            "messages": self.messages,
            "tokens": self.tokens,
            "messages_per_s": round(self.messages / self.wall_s),
            "tokens_per_s": round(self.tokens / self.wall_s),
            "tokens_per_message": round(self.tokens / max(self.messages, 1), 2),
            "first_ms": round(median(self.firsts) * 1e3, 2),
            "gap_p50_ms": round(gaps[49] * 1e3, 1),
            "gap_p99_ms": round(gaps[98] * 1e3, 1),
        }


@dataclass(frozen=True)
class Load:
    """So many streams at once, of so many tokens, at so many a second (0: as fast as taken)."""

    streams: int
    tokens: int
    rate: int = 0
    rounds: int = 1


async def over_grpc(address: str, method: str, load: Load) -> Counts:
    """Run calls of Engine/Run or Inference/Generate."""
    counts = Counts()
    async with grpc.aio.insecure_channel(address, options=rpc.STREAM_OPTIONS) as channel:
        call = channel.unary_stream(method)

        async def one(number: int) -> None:
            request = inference_pb2.GenerateRequest(
                model=MODEL,
                token_ids=inference_pb2.TokenIds(ids=range(128)),
                sampling=inference_pb2.SamplingParams(seed=load.rate),
                stop=inference_pb2.StopParams(max_tokens=load.tokens),
            )
            envelope = engine_pb2.EngineRequest(request=request)
            envelope.request.request_id = f"r{number}"
            message = envelope if method == INTERNAL else request
            meter = _Meter(counts)
            async for raw in call(message.SerializeToString()):
                meter.record(inference_pb2.GenerateResponse.FromString(raw).delta.num_tokens)

        await _rounds(counts, load, one)
    return counts


async def over_sse(address: str, load: Load) -> Counts:
    """Run streamed chat completions."""
    counts = Counts()
    host, _, port = address.rpartition(":")
    body = json.dumps(
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "word " * 100}],
            "stream": True,
            "max_tokens": load.tokens,
            "seed": load.rate,
        }
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {address}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"

    async def one(_: int) -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + body)
        meter = _Meter(counts)
        async for line in reader:
            if line.startswith(b"data: {"):
                meter.record(line.count(b" word"))
            elif line.startswith(b"data: [DONE]"):
                break
            elif line.startswith(b"HTTP/1.1 ") and b" 200 " not in line:
                raise RuntimeError(line.decode())
        writer.close()
        if not meter.any:
            raise RuntimeError("the stream ended without a token")

    await _rounds(counts, load, one)
    return counts


class _Meter:
    def __init__(self, counts: Counts) -> None:
        self._counts, self._began, self._last = counts, time.perf_counter(), 0.0

    @property
    def any(self) -> bool:
        """Whether anything was seen."""
        return self._last > 0

    def record(self, tokens: int) -> None:
        now = time.perf_counter()
        if self._last:
            self._counts.gaps.append(now - self._last)
        else:
            self._counts.firsts.append(now - self._began)
        self._last = now
        self._counts.messages += 1
        self._counts.tokens += tokens


async def _rounds(counts: Counts, load: Load, one: Callable[[int], Awaitable[None]]) -> None:
    began = time.perf_counter()
    for _ in range(load.rounds):
        await asyncio.gather(*(one(number) for number in range(load.streams)))
    counts.wall_s = time.perf_counter() - began
