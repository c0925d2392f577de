"""Many streams in one call, on real sockets: all come whole, and none waits for another."""

import asyncio
import random

import grpc
import pytest

from services.common.rpc.carrier import take_messages
from services.common.rpc.carrier.call import WINDOW_BYTES
from services.common.rpc.carrier.outbox import Outbox
from tests.doubles.carrier_peer import LIMIT_S, CarrierPeer, linked, request_of, until, whole


async def test_many_streams_come_whole_in_one_call(pair):
    names = [f"s{number}" for number in range(60)]
    answers = await asyncio.gather(*(pair.all_of(name, 40) for name in names))
    for name, answer in zip(names, answers, strict=True):
        assert answer == whole(name, 40)
    assert len(pair.peer.carrier_metadata) == 1
    await until(lambda: sorted(pair.peer.ended) == sorted(names))


async def test_what_goes_along_with_a_call(pair):
    call = pair.run(request_of("m"), metadata=(("who", "me"),), timeout_s=25.0)
    assert await take_messages(call)
    assert dict(await call.initial_metadata()) == {"engine": "e-m"}
    assert pair.peer.metadata == [{"who": "me"}]
    assert 0 < pair.peer.timeouts[0] <= 25
    async for _ in call:
        pass
    assert await call.read() is grpc.aio.EOF
    assert call.done()
    assert not call.cancel()


async def test_a_reader_that_stops_holds_up_its_own_producer_only(pair):
    stopped = pair.run(request_of("stopped", tokens=5000))
    assert await stopped.read()
    for round_ in range(3):
        answers = await asyncio.gather(*(pair.all_of(f"r{round_}-{n}", 300) for n in range(8)))
        assert [len(answer) for answer in answers] == [300] * 8
    far = pair.peer.written["stopped"] * len(whole("stopped", 1)[0])
    assert far <= 2 * WINDOW_BYTES
    rest = [raw async for raw in stopped]
    assert [whole("stopped", 1)[0], *rest] == whole("stopped", 5000)


async def test_a_message_longer_than_the_window_passes(pair):
    long = "x" * (3 * WINDOW_BYTES)
    call = pair.run(request_of(long, tokens=3))
    assert [raw async for raw in call] == whole(long, 3)


async def test_ends_come_after_messages_that_fill_more_than_one_batch(pair):
    names = [f"{number}" * 700 for number in range(100, 300)]
    answers = await asyncio.gather(*(pair.all_of(name, 1) for name in names))
    assert answers == [whole(name, 1) for name in names]


async def test_one_of_the_version_before_is_asked_with_run():
    peer = CarrierPeer(serves_many=False)
    async with linked(peer) as made:
        for number in range(3):
            assert await made.all_of(f"r{number}") == whole(f"r{number}")
        assert not made.link.carries
        await until(lambda: len(peer.ended) == 3)


async def test_a_long_request_goes_alone(pair):
    long = request_of("long", tokens=3) + b"\x0a\x00" * 600_000
    assert [raw async for raw in pair.run(long)] == whole("long", 3)
    assert type(pair.run(request_of("short"))) is not type(pair.run(long))


@pytest.mark.parametrize("seed", range(3))
async def test_random_readers_get_a_beginning_of_their_stream_and_nothing_leaks(pair, seed):
    draw = random.Random(seed)

    async def read_some(name: str, tokens: int, most: int, pauses: float) -> None:
        call = pair.run(request_of(name, draw.choice(["", "slow", "hang"]), tokens))
        got: list[bytes] = []
        while len(got) < most and (messages := await take_messages(call)):
            got += messages
            if draw.random() < pauses:
                await asyncio.sleep(draw.random() / 50)
        call.cancel()
        assert got == whole(name, tokens)[: len(got)]
        assert len(got) >= min(most, tokens)

    await asyncio.gather(
        *(
            read_some(f"s{n}", tokens := draw.randint(1, 150), draw.randint(1, tokens), n % 3 / 4)
            for n in range(60)
        )
    )
    await until(lambda: not pair.peer.open_requests)
    assert len(pair.peer.ended) == 60
    carrier = pair.link._carrier
    assert not carrier._calls
    await until(lambda: not (carrier._credits or carrier._cancelled or carrier._opened))


async def test_nobody_waits_for_what_has_been_written_already():
    """A stream whose last message went while it waited for credit may find the outbox busy."""
    pending, written, go_on = ["one"], [], asyncio.Event()

    async def write(frames: str) -> None:
        written.append(frames)
        await go_on.wait()

    outbox = Outbox(lambda: pending.pop() if pending else None, write)
    outbox.notify()
    task = asyncio.create_task(outbox.run())
    await until(lambda: outbox.busy)
    waiting = asyncio.create_task(outbox.wait_collected())
    await asyncio.sleep(0)
    go_on.set()
    await asyncio.wait_for(waiting, LIMIT_S)
    outbox.finish()
    await asyncio.wait_for(task, LIMIT_S)
    assert written == ["one"]
