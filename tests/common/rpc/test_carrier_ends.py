"""Carried streams end as calls of their own do, each by itself, whichever side ends them."""

import asyncio

import grpc
import pytest

from services.common import errors, rpc
from tests.doubles.carrier_peer import LIMIT_S, read_to_end, request_of, until, whole


async def test_no_deadline_is_none(pair):
    assert [raw async for raw in pair.run(request_of("n"), timeout_s=None)] == whole("n")
    assert pair.peer.timeouts == [None]


async def test_a_cancelled_stream_ends_over_there_and_its_reader_is_told(pair):
    call = pair.run(request_of("gone", "hang", tokens=2))
    other = pair.run(request_of("stays", "hang", tokens=1))
    assert await other.read()
    await call.read()
    reading = asyncio.ensure_future(read_to_end(call))
    await asyncio.sleep(0)
    assert call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    with pytest.raises(asyncio.CancelledError):
        await call.read()
    await until(lambda: pair.peer.open_requests == {"stays"})
    assert pair.peer.ended == ["gone"]
    assert not other.done()


async def test_a_reader_whose_task_ends_cancels_its_stream(pair):
    call = pair.run(request_of("gone", "hang", tokens=1))
    reading = asyncio.create_task(read_to_end(call))
    await until(lambda: "gone" in pair.peer.open_requests)
    reading.cancel()
    await asyncio.wait({reading})
    assert call.cancelled()
    await until(lambda: not pair.peer.open_requests)


async def test_cancelled_before_it_was_sent(pair):
    for number in range(20):
        pair.run(request_of(f"r{number}", "hang")).cancel()
    assert await pair.all_of("after") == whole("after")
    await until(lambda: not pair.peer.open_requests)


async def test_a_deadline_ends_both_sides(pair):
    call = pair.run(request_of("late", "hang", tokens=1), timeout_s=0.2)
    assert await call.read()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: not pair.peer.open_requests)


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("refuse", errors.ResourceExhaustedError),
        ("abort", errors.NotFoundError),
        ("bug", errors.InternalError),
    ],
)
async def test_statuses_are_those_of_a_call_of_its_own(pair, how, kind):
    ends = []
    async with grpc.aio.insecure_channel(pair.address) as channel:
        alone = channel.unary_stream("/inferfleet.internal.v1.Engine/Run")
        for call in (pair.run(request_of("r", how)), alone(request_of("r", how))):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            ends.append(caught.value)
    carried, own = (errors.error_of(end) for end in ends)
    assert type(carried) is type(own) is kind
    assert (carried.message, carried.reason) == (own.message, own.reason)
    assert carried.retry_after_s == own.retry_after_s
    has_details = [errors.DETAILS_KEY in dict(end.trailing_metadata()) for end in ends]
    assert has_details[0] == has_details[1]


async def test_what_is_no_request_is_refused_alone(pair):
    other = pair.run(request_of("stays", "hang", tokens=1))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pair.run(b"\xff\xff\xff").read()
    assert errors.error_of(caught.value).reason == "MALFORMED_MESSAGE"
    assert await other.read()


async def test_a_message_that_is_too_long_ends_its_own_stream_only(pair):
    other = pair.run(request_of("stays", "hang", tokens=1))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await pair.run(request_of("x" * 1000, "long")).read()
    assert errors.error_of(caught.value).reason == "MESSAGE_TOO_LONG"
    assert await other.read()
    assert pair.link.carries


async def test_many_that_fail_at_once_are_all_told(pair):
    calls = [pair.run(request_of(f"r{number}", "refuse")) for number in range(400)]
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert errors.error_of(caught.value).retry_after_s == 3


async def test_streams_of_a_peer_that_dies_are_unavailable_and_the_next_finds_it_again(pair):
    calls = [pair.run(request_of(f"s{n}", "hang", tokens=1)) for n in range(5)]
    for call in calls:
        assert await call.read()
    await pair.peer.stop()
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert errors.DETAILS_KEY not in dict(caught.value.trailing_metadata())
    await until(lambda: not pair.link.carries)
    await pair.peer.start()
    await asyncio.wait_for(pair.link.wait_carries(), LIMIT_S)
    assert await pair.all_of("again") == whole("again")
    assert len(pair.peer.carrier_metadata) == 2


async def test_streams_of_a_caller_that_dies_end(pair):
    for number in range(5):
        assert await pair.run(request_of(f"s{number}", "hang", tokens=1)).read()
    await pair.link.close()
    await until(lambda: not pair.peer.open_requests)
    assert len(pair.peer.ended) == 5


async def test_a_peer_that_closes_tells_how_its_streams_ended_first(pair):
    running = pair.run(request_of("last", "slow", tokens=50))
    assert await running.read()
    closing = asyncio.create_task(pair.peer.many.close(LIMIT_S))
    assert len([raw async for raw in running]) == 49
    await asyncio.wait_for(closing, LIMIT_S)
    await until(lambda: not pair.link.carries)
    assert await pair.all_of("next") == whole("next")


async def test_a_link_that_leaves_lets_its_streams_end(pair):
    running = pair.run(request_of("last", "slow", tokens=200))
    assert await running.read()
    leaving = asyncio.create_task(pair.link.drain())
    assert len([raw async for raw in running]) == 199
    await asyncio.wait_for(leaving, LIMIT_S)
    await until(lambda: not pair.peer.open_requests)


async def test_new_certificates_mean_a_new_call_and_old_streams_end_on_the_old_one(
    pair, monkeypatch
):
    running = pair.run(request_of("old", "slow", tokens=2000))
    assert await running.read()
    monkeypatch.setattr(rpc.Membership, "version", property(lambda _: 1))
    assert await pair.all_of("between") == whole("between")
    await asyncio.wait_for(pair.link.wait_carries(), LIMIT_S)
    assert await pair.all_of("new") == whole("new")
    assert len(pair.peer.carrier_metadata) == 2
    assert len([raw async for raw in running]) == 1999
