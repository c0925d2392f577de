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
from tests.doubles.gateway import running_gateway, text_engine
from tests.doubles.scripts import fail_with, hold_after_first


@pytest.fixture
async def pair(engine):
    second = text_engine()
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


async def test_balancers_take_turns(pair):
    async with (
        running_gateway(*pair) as gateway,
        grpc.aio.insecure_channel(gateway.address) as channel,
    ):
        for _ in range(6):
            await ask(channel, gateway)
    assert [len(double.requests) for double in pair] == [3, 3]


async def test_a_dead_balancer_fails_no_request(pair):
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


async def test_an_unreachable_balancer_is_logged_once_a_second(caplog, free_port):
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
    warnings = [record for record in caplog.records if address in record.getMessage()]
    assert 1 <= len(warnings) <= 1 + took_s / WARN_EVERY_S


async def test_a_stream_continues_at_a_balancer_that_has_left_the_registry(engine):
    """Like a balancer that drains: it accepts no request and ends its streams."""
    resume = asyncio.Event()

    async def paused(engine_request, double):
        yield double.started(engine_request)
        await resume.wait()
        yield double.summary(engine_request, 0)

    engine.script = paused
    present = [engine.address]
    balancers = Balancers(lambda: present, Membership(), retry_s=0.1, stall_s=30)
    upstream = await balancers.open(
        engine_pb2.EngineRequest().SerializeToString(), (), time.monotonic() + 30
    )
    assert len(await upstream.read_messages()) == 1
    present.clear()
    await balancers.forget_absent()
    with pytest.raises(errors.UnavailableError, match="no balancer is registered"):
        await balancers.open(b"", (), time.monotonic() + 30)
    resume.set()
    assert len(await upstream.read_messages()) == 1
    assert not await upstream.read_messages()
    await balancers.close()


async def test_a_refusal_with_a_retry_hint_is_final(pair):
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


async def test_other_refusals_are_not_retried(pair):
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


async def the_rest(engine_request, double):
    """The rest of the engine's reply after the request's continuation."""
    sent = (
        bytes(engine_request.continuation.choices[0].token_ids)
        if engine_request.continuation.choices
        else b""
    )
    rest = double.reply.encode()[len(sent) :].decode()
    yield double.started(engine_request)
    yield double.delta(engine_request, 0, rest, list(rest.encode()))
    yield inference_pb2.GenerateResponse(finished={"reason": "FINISH_REASON_MAX_TOKENS"})
    yield double.summary(engine_request, len(rest.encode()))


async def test_a_balancer_that_dies_during_a_stream_is_replaced(pair):
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
    (resumed,) = other.requests
    assert list(resumed.continuation.choices[0].token_ids) == [72]
    assert resumed.numerics_id == "numerics-1"
    assert resumed.attempt >= 16
    assert (resumed.request.request_id, resumed.request.sampling.seed) == ("r", 5)
    summary = events[-1].summary
    assert (summary.continuations, summary.exact) == (1, False)
    assert summary.usage.completion_tokens == len(lost.reply.encode())


CALLED = '<tool_call>{"name": "f", "arguments": {"a": "xyz"}}</tool_call>'


def part_of_a_call(begin: int, end: int | None):
    """A part of an answer that calls a tool, then its end or silence."""

    async def script(engine_request, double):
        yield double.started(engine_request)
        text = CALLED[begin:end]
        yield double.delta(engine_request, 0, text, list(text.encode()))
        if end is not None:
            await asyncio.Event().wait()
        yield inference_pb2.GenerateResponse(finished={"reason": "FINISH_REASON_EOS"})
        yield double.summary(engine_request, len(text))

    return script


@pytest.mark.parametrize("cut", range(3, len(CALLED), 9))
async def test_a_tool_call_is_resumed_wherever_it_was_cut(pair, cut):
    for double in pair:
        double.max_model_len = 4096
        double.script = part_of_a_call(0, cut)
    chat = inference_pb2.Chat(messages=[{"role": "user", "content": "hi"}], tools=[{"name": "f"}])
    async with (
        running_gateway(*pair) as gateway,
        grpc.aio.insecure_channel(gateway.address) as channel,
    ):
        call = gateway.stub(channel).Generate(
            inference_pb2.GenerateRequest(model="tiny", chat=chat)
        )
        events = await first_events(call)
        lost = next(d for d in pair if d.engine_id == events[0].started.engine_id)
        other = next(d for d in pair if d is not lost)
        other.script = part_of_a_call(cut, None)
        await lost.stop()
        events += await rest_of(call)
    (resumed,) = other.requests
    assert resumed.continuation.choices[0].sent_text_bytes == cut
    calls = [e.delta.tool_call for e in events if e.delta.WhichOneof("content") == "tool_call"]
    assert [call.name for call in calls if call.name] == ["f"]
    assert "".join(call.arguments for call in calls) == '{"a": "xyz"}'
    assert not "".join(event.delta.text for event in events)
    assert events[-1].summary.continuations == 1


async def test_a_balancer_that_dies_before_the_summary_loses_only_the_timings(pair):
    async def all_but_the_summary(engine_request, double):
        yield double.started(engine_request)
        yield double.delta(engine_request, 0, "H", [72])
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


async def test_without_another_balancer_the_stream_breaks(engine):
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
    error = errors.error_of(caught.value)
    assert error.reason == "STREAM_BROKEN"
    assert error.message == "the stream broke: its balancer is gone"


async def test_no_balancer_can_be_reached(engine):
    async with running_gateway(engine, balancers=("127.0.0.1:1",), carried=False) as gateway:
        async with grpc.aio.insecure_channel(gateway.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(channel, gateway)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        error = errors.error_of(caught.value)
        # Without the transport's own message, which names addresses.
        assert (error.message, error.retry_after_s) == (
            "no balancer can be reached; try again",
            1,
        )
