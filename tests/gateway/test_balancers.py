"""Which balancer gets a request, and what happens when one dies."""

import asyncio
import logging
import socket
import time

import grpc
import pytest

from inferfleet_proto.internal.v1 import engine_pb2
from inferfleet_proto.v1 import inference_pb2
from services.common import errors
from services.common.rpc import Membership
from services.gateway.balancers import WARN_EVERY_S, Balancers
from tests.doubles.gateway_fleet import EngineDouble, fail_with, hold_after_first, running_gateway


@pytest.fixture
async def pair(engine):
    second = EngineDouble()
    second.engine_id = "engine-2"
    await second.start()
    yield engine, second
    await second.stop()


@pytest.fixture
def free_port():
    """A port that is bound and refuses connections."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def request(**fields):
    return inference_pb2.GenerateRequest(model="tiny", text="ab", **fields)


async def ask(channel, gateway, **fields):
    return await gateway.stub(channel).Complete(request(**fields))


async def test_turns_are_taken(pair):
    async with (
        running_gateway(*pair) as gateway,
        grpc.aio.insecure_channel(gateway.address) as channel,
    ):
        for _ in range(6):
            await ask(channel, gateway)
    assert [len(double.requests) for double in pair] == [3, 3]


async def test_a_dead_one_costs_nobody_anything(pair):
    async with (
        running_gateway(*pair) as gateway,
        grpc.aio.insecure_channel(gateway.address) as channel,
    ):
        await pair[0].stop()
        answers = await asyncio.gather(*(ask(channel, gateway) for _ in range(10)))
    assert {answer.summary.engine_id for answer in answers} == {"engine-2"}
    attempts = {r.attempt for r in pair[1].requests}
    assert 0 in attempts
    assert attempts <= {0, 16, 32}


async def test_a_later_try_is_a_higher_attempt_of_the_same_request(pair):
    full = errors.UnavailableError("just restarting")
    pair[0].script = pair[1].script = fail_with(full)
    async with (
        running_gateway(*pair) as gateway,
        grpc.aio.insecure_channel(gateway.address) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(channel, gateway, request_id="r", sampling={"seed": 5})
    assert errors.error_of(caught.value).retry_after_s == 1
    tried = sorted(pair[0].requests + pair[1].requests, key=lambda r: r.attempt)
    assert [r.attempt for r in tried] == [16 * i for i in range(len(tried))]
    assert len(tried) >= 4
    assert {(r.request.request_id, r.request.sampling.seed) for r in tried} == {("r", 5)}


async def test_one_that_is_away_is_told_of_once_a_second(caplog, free_port):
    address = f"127.0.0.1:{free_port}"
    balancers = Balancers(lambda: [address], Membership(), retry_s=0.35, stall_s=5)
    deadline_s = time.monotonic() + 20
    streams = [balancers.open(b"", (), deadline_s) for _ in range(20)]
    with caplog.at_level(logging.WARNING, logger="services.gateway.balancers"):
        began = time.monotonic()
        outcomes = await asyncio.gather(*streams, return_exceptions=True)
        took_s = time.monotonic() - began
    await balancers.close()
    assert all(isinstance(outcome, errors.UnavailableError) for outcome in outcomes)
    told = [record for record in caplog.records if address in record.getMessage()]
    assert 1 <= len(told) <= 1 + took_s / WARN_EVERY_S


async def test_a_stream_goes_on_at_one_that_has_left_the_registry(engine):
    """As a balancer does that drains: it takes no more and ends what it has."""
    go_on = asyncio.Event()

    async def paused(asked, double):
        yield double.started(asked)
        await go_on.wait()
        yield double.summary(asked, 0)

    engine.script = paused
    present = [engine.address]
    balancers = Balancers(lambda: present, Membership(), retry_s=0.1, stall_s=30)
    upstream = await balancers.open(
        engine_pb2.EngineRequest().SerializeToString(), (), time.monotonic() + 30
    )
    assert len(await upstream.take()) == 1
    present.clear()
    await balancers.forget_absent()
    with pytest.raises(errors.UnavailableError, match="no balancer is known"):
        await balancers.open(b"", (), time.monotonic() + 30)
    go_on.set()
    assert len(await upstream.take()) == 1
    assert not await upstream.take()
    await balancers.close()


async def test_one_that_says_when_to_come_back_is_believed(pair):
    busy = errors.UnavailableError("no engine", reason="NO_ENGINE", retry_after_s=7)
    pair[0].script = pair[1].script = fail_with(busy)
    async with (
        running_gateway(*pair) as gateway,
        grpc.aio.insecure_channel(gateway.address) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(channel, gateway)
    assert errors.error_of(caught.value).retry_after_s == 7
    assert sum(len(double.requests) for double in pair) == 2


async def test_other_refusals_are_not_carried_around(pair):
    pair[0].script = pair[1].script = fail_with(errors.ResourceExhaustedError("full"))
    async with (
        running_gateway(*pair) as gateway,
        grpc.aio.insecure_channel(gateway.address) as channel,
    ):
        with pytest.raises(grpc.aio.AioRpcError):
            await ask(channel, gateway)
    assert sum(len(double.requests) for double in pair) == 1


async def first_events(call) -> list:
    return [await call.read(), await call.read()]


async def rest_of(call) -> list:
    events = []
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


async def the_rest(asked, double):
    """What is left of the double's reply after the continuation that it is told of."""
    sent = bytes(asked.continuation.choices[0].token_ids) if asked.continuation.choices else b""
    rest = double.reply.encode()[len(sent) :].decode()
    yield double.started(asked)
    yield double.delta(asked, 0, rest, list(rest.encode()))
    yield inference_pb2.GenerateResponse(finished={"reason": "FINISH_REASON_MAX_TOKENS"})
    yield double.summary(asked, len(rest.encode()))


async def test_one_that_dies_in_mid_stream_is_replaced_unseen(pair):
    for double in pair:
        double.script = hold_after_first
    async with (
        running_gateway(*pair) as gateway,
        grpc.aio.insecure_channel(gateway.address) as channel,
    ):
        call = gateway.stub(channel).Generate(request(request_id="r", sampling={"seed": 5}))
        events = await first_events(call)
        lost = next(d for d in pair if d.engine_id == events[0].started.engine_id)
        other = next(d for d in pair if d is not lost)
        other.script = the_rest
        await lost.stop()
        events += await rest_of(call)
    assert "".join(event.delta.text for event in events) == lost.reply
    assert [e.WhichOneof("event") for e in events].count("started") == 1
    (carried,) = other.requests
    assert list(carried.continuation.choices[0].token_ids) == [72]
    assert carried.numerics_id == "numerics-1"
    assert carried.attempt >= 16
    assert (carried.request.request_id, carried.request.sampling.seed) == ("r", 5)
    summary = events[-1].summary
    assert (summary.continuations, summary.exact) == (1, False)
    assert summary.usage.completion_tokens == len(lost.reply.encode())


CALLED = '<tool_call>{"name": "f", "arguments": {"a": "xyz"}}</tool_call>'


def part_of_a_call(begin: int, end: int | None):
    """A part of an answer that calls a tool, then its end or silence."""

    async def script(asked, double):
        yield double.started(asked)
        text = CALLED[begin:end]
        yield double.delta(asked, 0, text, list(text.encode()))
        if end is not None:
            await asyncio.Event().wait()
        yield inference_pb2.GenerateResponse(finished={"reason": "FINISH_REASON_EOS"})
        yield double.summary(asked, len(text))

    return script


@pytest.mark.parametrize("cut", range(3, len(CALLED), 9))
async def test_a_call_that_is_cut_anywhere_is_gone_on_with(pair, cut):
    for double in pair:
        double.max_model_len = 4096
        double.script = part_of_a_call(0, cut)
    chat = inference_pb2.Chat(messages=[{"role": "user", "content": "hi"}], tools=[{"name": "f"}])
    async with (
        running_gateway(*pair) as gateway,
        grpc.aio.insecure_channel(gateway.address) as channel,
    ):
        asked = inference_pb2.GenerateRequest(model="tiny", chat=chat)
        call = gateway.stub(channel).Generate(asked)
        events = await first_events(call)
        lost = next(d for d in pair if d.engine_id == events[0].started.engine_id)
        other = next(d for d in pair if d is not lost)
        other.script = part_of_a_call(cut, None)
        await lost.stop()
        events += await rest_of(call)
    (carried,) = other.requests
    assert carried.continuation.choices[0].sent_text_bytes == cut
    calls = [e.delta.tool_call for e in events if e.delta.WhichOneof("content") == "tool_call"]
    assert [call.name for call in calls if call.name] == ["f"]
    assert "".join(call.arguments for call in calls) == '{"a": "xyz"}'
    assert not "".join(event.delta.text for event in events)
    assert events[-1].summary.continuations == 1


async def test_one_that_dies_before_the_last_message_costs_only_the_timings(pair):
    async def all_but_the_summary(asked, double):
        yield double.started(asked)
        yield double.delta(asked, 0, "H", [72])
        yield inference_pb2.GenerateResponse(finished={"reason": "FINISH_REASON_MAX_TOKENS"})
        await asyncio.Event().wait()

    pair[0].script = pair[1].script = all_but_the_summary
    async with (
        running_gateway(*pair) as gateway,
        grpc.aio.insecure_channel(gateway.address) as channel,
    ):
        call = gateway.stub(channel).Generate(request())
        events = [*(await first_events(call)), await call.read()]
        lost = next(d for d in pair if d.engine_id == events[0].started.engine_id)
        await lost.stop()
        events += await rest_of(call)
    assert events[-1].summary.usage.completion_tokens == 1
    assert sum(len(double.requests) for double in pair) == 1


async def test_with_nobody_else_the_stream_breaks(engine):
    engine.script = hold_after_first
    async with (
        running_gateway(engine) as gateway,
        grpc.aio.insecure_channel(gateway.address) as channel,
    ):
        call = gateway.stub(channel).Generate(request())
        await first_events(call)
        await engine.stop()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.ABORTED
    told = errors.error_of(caught.value)
    assert told.reason == "STREAM_BROKEN"
    assert told.message == "the stream broke: its balancer is gone"


async def test_nobody_to_ask(engine):
    async with running_gateway(engine, balancers=("127.0.0.1:1",), carried=False) as gateway:
        async with grpc.aio.insecure_channel(gateway.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(channel, gateway)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        told = errors.error_of(caught.value)
        # Nothing of the transport's own words, which name addresses.
        assert (told.message, told.retry_after_s) == (
            "no balancer can be reached; try again",
            1,
        )
