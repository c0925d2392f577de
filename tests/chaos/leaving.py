"""Clients that leave: during a prefill, in mid-stream, while they wait, after the last message."""

import asyncio
import time

import grpc

from inferfleet_proto.v1 import inference_pb2 as pb
from inferfleet_proto.v1 import inference_pb2_grpc
from tests.chaos.scenario import Row, Stage
from tests.chaos.workload import MODEL

Call = grpc.aio.UnaryStreamCall[pb.GenerateRequest, pb.GenerateResponse]

_EACH = 4
_LONG_PROMPT = 1500
_FREE_LIMIT_S = 1.0


async def clients_leave(stage: Stage) -> list[Row]:
    """Twenty clients leave at every stage of a request: engines drop their work within a second."""
    row = Row("clients leave", heal_limit_s=float("inf"))
    async with stage.under_load(row, watch=lambda _: True):
        ways = (_during_prefill, _in_mid_stream, _unary, _while_queued, _after_the_last)
        await asyncio.gather(*(way(stage, n) for way in ways for n in range(_EACH)))
        row.rounds = _EACH * len(ways)
        await stage.heal(row, time.monotonic())
    # The last of the clients that stayed have ended: what still runs now has no client.
    row.notes["idle_s"] = round(await stage.fleet.until(lambda: _free(stage), "free blocks", 30), 2)

    # Again, alone: all that the engines have is of clients that are about to leave.
    calls = [_call(stage, n, 1500) for n in range(_EACH)]
    await asyncio.gather(*(_read(call, 3) for call in calls))
    began = time.monotonic()
    for call in calls:
        call.cancel()
    await stage.fleet.until(lambda: _free(stage), "free blocks", 30)
    row.notes["dropped_s"] = round(time.monotonic() - began, 2)
    if row.notes["dropped_s"] > _FREE_LIMIT_S:
        row.notes["slow_drop"] = True
    return [row]


async def _during_prefill(stage: Stage, number: int) -> None:
    call = _call(stage, number, 10, prompt=_LONG_PROMPT)
    await asyncio.sleep(0.1)
    call.cancel()


async def _in_mid_stream(stage: Stage, number: int) -> None:
    call = _call(stage, number, 1500)
    await _read(call, 3)
    call.cancel()


async def _unary(stage: Stage, number: int) -> None:
    call = _stub(stage, number).Complete(_request(1500, 20), timeout=60)
    await asyncio.sleep(1.0)
    call.cancel()


async def _while_queued(stage: Stage, number: int) -> None:
    _call(stage, number, 1500).cancel()
    await asyncio.sleep(0)


async def _after_the_last(stage: Stage, number: int) -> None:
    call = _call(stage, number, 5)
    await _read(call, 10**6)
    call.cancel()


async def _read(call: Call, count: int) -> None:
    while count > 0 and await call.read() is not grpc.aio.EOF:
        count -= 1


async def _free(stage: Stage) -> bool:
    loads = [await stage.fleet.load(name) for name in stage.fleet.engines]
    return all(
        load is not None
        and not (load.running_requests or load.waiting_requests or load.held_blocks)
        for load in loads
    )


def _call(stage: Stage, number: int, max_tokens: int, prompt: int = 20) -> Call:
    return _stub(stage, number).Generate(_request(max_tokens, prompt, number), timeout=60)


def _stub(stage: Stage, number: int) -> inference_pb2_grpc.InferenceStub:
    return inference_pb2_grpc.InferenceStub(stage.clients.channel(number))


def _request(max_tokens: int, prompt: int, number: int = 0) -> pb.GenerateRequest:
    ids = [(number * 31 + position * 7) % 200 for position in range(prompt)]
    request = pb.GenerateRequest(model=MODEL, token_ids=pb.TokenIds(ids=ids))
    request.sampling.temperature = 0
    request.stop.max_tokens = max_tokens
    request.stop.ignore_eos = True
    return request
