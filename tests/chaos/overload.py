"""Scenarios with more requests than the fleet can run, and with readers that stop reading."""

import asyncio
import time

import grpc

from inferfleet_proto.v1 import inference_pb2 as pb
from inferfleet_proto.v1 import inference_pb2_grpc
from services.common import errors
from tests.chaos.scenario import Row, Stage

SETTINGS = {
    "engine": {"max_num_seqs": "4", "stream_buffer_tokens": "512"},
    "balancer": {"queue_size": "6", "engine_headroom": "0"},
}
"""Of the small fleet that these scenarios run on: 4 sequences an engine, 6 waiting a balancer."""
_SEQUENCES, _WAITING = 4, 6
_STALLED_READERS = 4
_MEASURED_S = 15.0
_GOODPUT = 0.9


async def overload(stage: Stage) -> list[Row]:
    """Three times the requests that can run or wait: the rest is refused with RetryInfo."""
    engines, balancers = len(stage.fleet.engines), len(stage.fleet.balancers)
    running = engines * _SEQUENCES
    peak = await _goodput(stage, Row("at capacity"), running + balancers)
    row = Row("overload 3 x", heal_limit_s=float("inf"))
    loaded = await _goodput(stage, row, 3 * (running + balancers * _WAITING))
    row.notes |= {"peak_tokens_per_s": round(peak, 1), "tokens_per_s": round(loaded, 1)}
    row.notes["goodput"] = round(loaded / peak, 3)
    if loaded < _GOODPUT * peak:
        row.notes["below"] = _GOODPUT
    if not row.counts.refused:
        row.violations.append("nothing was refused: this was no overload")
    return [row]


async def slow_readers(stage: Stage) -> list[Row]:
    """Four readers stop reading long answers; the others must not notice."""
    row = Row("slow readers")
    # As many as run beside the readers: a stream that waits for its turn stands still by right.
    others = len(stage.fleet.engines) * _SEQUENCES - _STALLED_READERS
    async with stage.under_load(row, streams=others, watch=lambda _: True):
        readers = [asyncio.create_task(_stalled(stage)) for _ in range(_STALLED_READERS)]
        await stage.heal(row, time.monotonic())
        await asyncio.sleep(_MEASURED_S / 2)
        await stage.heal(row, time.monotonic())
        ends = await asyncio.gather(*readers)
        await stage.heal(row, time.monotonic())
    row.rounds = _STALLED_READERS
    row.notes["ends"] = {end: ends.count(end) for end in set(ends)}
    if set(ends) - {"OK", "READER_TOO_SLOW"}:
        row.violations.append(f"slow readers ended with {sorted(set(ends))}")
    return [row]


async def _goodput(stage: Stage, row: Row, streams: int) -> float:
    """Tokens per second that clients got of answers that ended well."""
    row.counts = stage.clients.fresh_counts()
    stage.clients.start(stage.cases, streams)
    await stage.flowing(stage.plan.streams // 8 or 1)
    await asyncio.sleep(2.0)
    began, before = time.monotonic(), stage.clients.tokens_heard
    await asyncio.sleep(_MEASURED_S)
    rate = (stage.clients.tokens_heard - before) / (time.monotonic() - began)
    await stage.clients.stop()
    row.rounds = 1
    return rate


async def _stalled(stage: Stage) -> str:
    """Read one message of a long, wide answer, stop for a while, and read what is left."""
    request = stage.cases[0].request()
    request.stop.max_tokens = 1500
    request.response.logprobs = True
    request.response.top_logprobs = 20
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_536)]
    async with grpc.aio.insecure_channel(stage.fleet.gateways[0], options=options) as channel:
        call = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=240)
        tokens = 0
        try:
            first = True
            async for event in call:
                if first:
                    await asyncio.sleep(_MEASURED_S)
                first = False
                tokens += len(event.delta.token_ids)
                last = event
        except grpc.RpcError as error:
            return errors.error_of(error).reason
    return "OK" if _whole(last, tokens) else "TRUNCATED"


def _whole(last: pb.GenerateResponse, tokens: int) -> bool:
    return last.HasField("summary") and last.summary.usage.completion_tokens == tokens
