"""The errors of requests that still run at the end of a drain."""

import asyncio
import json

import grpc
import httpx
import pytest

from inferfleet_proto.v1 import inference_pb2
from services.common import errors
from tests.doubles.gateway import sse_events
from tests.doubles.scripts import hold_after_first

REQUEST = inference_pb2.GenerateRequest(model="tiny", text="ab")
BODY = {"model": "tiny", "prompt": "ab"}


async def hold_at_once(request, double):
    await asyncio.Event().wait()
    yield double.started(request)


async def shut_down(gateway) -> None:
    async with asyncio.timeout(10):
        await gateway.service.drain()
        await gateway.service.stop()


async def error_from(call) -> errors.FleetError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert errors.DETAILS_KEY in dict(caught.value.trailing_metadata())
    return errors.error_of(caught.value)


async def to_end(call) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


@pytest.fixture
async def short(start_gateway):
    """A gateway that has almost no grace."""
    return await start_gateway(drain_grace_s=0.05)


@pytest.fixture
async def channel(short):
    async with grpc.aio.insecure_channel(short.address) as channel:
        yield channel


@pytest.fixture
async def http_short(short):
    async with httpx.AsyncClient(base_url=f"http://{short.http}", timeout=20) as client:
        yield client


async def test_a_stream_that_has_begun_is_aborted_with_its_counts(short, channel, engine):
    engine.script = hold_after_first
    call = short.stub(channel).Generate(REQUEST)
    assert [(await call.read()).WhichOneof("event") for _ in range(2)] == ["started", "delta"]
    ended = asyncio.create_task(error_from(to_end(call)))
    await shut_down(short)
    error = await ended
    assert isinstance(error, errors.AbortedError)
    assert error.reason == "DRAINING"
    assert error.metadata == {"prompt_tokens": "2", "completion_tokens": "1"}
    await engine.wait_for(lambda: engine.running == 0)


@pytest.mark.parametrize("script", [hold_at_once, hold_after_first])
async def test_a_caller_that_has_nothing_yet_may_retry(script, short, channel, engine):
    engine.script = script
    method = "Complete" if script is hold_after_first else "Generate"
    call = getattr(short.stub(channel), method)(REQUEST)
    ended = asyncio.create_task(error_from(call if method == "Complete" else to_end(call)))
    await engine.wait_for(lambda: engine.running == 1)
    await shut_down(short)
    error = await ended
    assert isinstance(error, errors.UnavailableError)
    assert (error.reason, error.retry_after_s) == ("DRAINING", 1)
    await engine.wait_for(lambda: engine.running == 0)


async def test_an_event_stream_ends_with_an_error_event(http_short, short, engine):
    engine.script = hold_after_first
    async with http_short.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as got:
        lines = got.aiter_text()
        text = await anext(lines)
        down = asyncio.create_task(shut_down(short))
        async for more in lines:  # raises if the connection is cut
            text += more
        await down
    error = sse_events(text)[-1]["error"]
    assert (error["type"], error["code"]) == ("server_error", "draining")
    await engine.wait_for(lambda: engine.running == 0)


@pytest.mark.parametrize("prompts", ["ab", ["ab", "cd"]])
async def test_a_whole_answer_that_is_not_ready_is_503(prompts, http_short, short, engine):
    engine.script = hold_after_first
    posting = asyncio.create_task(
        http_short.post("/v1/completions", json={**BODY, "prompt": prompts})
    )
    await engine.wait_for(lambda: engine.running == len(engine.requests) >= 1)
    await shut_down(short)
    answer = await posting
    assert answer.status_code == 503
    assert json.loads(answer.text)["error"]["code"] == "draining"
    assert answer.headers["retry-after"] == "1"


async def test_a_stop_without_a_drain_sends_the_same_error(short, channel, engine):
    engine.script = hold_after_first
    call = short.stub(channel).Generate(REQUEST)
    await call.read()
    ended = asyncio.create_task(error_from(to_end(call)))
    await short.service.stop()
    assert (await ended).reason == "DRAINING"
