"""Redis stops, hangs, pauses, refuses and comes back empty: nothing fails, nothing restarts."""

import asyncio
import time
from typing import Any

import grpc
import pytest
import redis

from inferfleet_proto.internal.v1 import prefix_index_pb2 as pb
from inferfleet_proto.internal.v1 import prefix_index_pb2_grpc

pytestmark = pytest.mark.services


async def away(ask: Any) -> None:
    """Redis is unavailable: the first answers take the small timeout, the later ones nothing."""
    await ask.until(known=False)
    times = sorted([(await ask())[2] for _ in range(20)])
    assert times[10] < 0.04, "while Redis is unavailable, no Match waits for it"


async def test_redis_hangs_and_goes_on(start_kvcache, start_redis, blocks, publisher, asker):
    server = start_redis()
    service = start_kvcache(server.url).wait_ready()
    async with service.channel() as channel:
        stream, ask = publisher(channel), asker(channel, blocks(1, 2, 3))
        await stream.send(blocks(1))
        await ask.until(known=True, blocks=1)
        server.pause()
        began = time.monotonic()
        known, _, took = await ask()
        assert (known, took < 0.5) == (False, True)
        await away(ask)
        await stream.send(blocks(2))  # dropped: Redis cannot take it
        await asyncio.sleep(max(0.0, 1.5 - (time.monotonic() - began)))
        server.resume()
        answer = await stream.answer(lambda a: a.need_snapshot)
        assert answer.need_snapshot
        await stream.send(blocks(1, 2, 3), part=0, last=True)
        await ask.until(known=True, blocks=3)
    assert service.process.poll() is None
    assert service.log.count("Redis is unavailable") == 1, "one line an outage"


async def test_redis_stops_and_comes_back_empty(
    start_kvcache, start_redis, blocks, publisher, asker
):
    server = start_redis()
    service = start_kvcache(server.url).wait_ready()
    async with service.channel() as channel:
        stream, ask = publisher(channel), asker(channel, blocks(1))
        await stream.send(blocks(1))
        await ask.until(known=True, blocks=1)
        server.stop()
        await away(ask)
        server.launch()
        began = time.monotonic()
        # The engine is idle and has lost nothing itself: a snapshot must be requested all the same.
        await stream.answer(lambda a: a.need_snapshot)
        await stream.send(blocks(1), part=0, last=True)
        await ask.until(known=True, blocks=1)
        assert time.monotonic() - began < 10
        await stream.send(blocks(2))
        assert (await stream.answer(lambda a: a.acked_sequence == 3)).acked_sequence == 3


async def test_a_flushed_store_is_noticed(start_kvcache, start_redis, blocks, publisher, asker):
    server = start_redis()
    service = start_kvcache(server.url).wait_ready()
    async with service.channel() as channel:
        stream = publisher(channel)
        await stream.send(blocks(1))
        await stream.answer(lambda a: a.acked_sequence == 1)
        with redis.Redis.from_url(server.url) as client:
            client.flushall()
        await stream.answer(lambda a: a.need_snapshot)


async def test_paused_clients(start_kvcache, start_redis, blocks, publisher, asker):
    server = start_redis()
    service = start_kvcache(server.url).wait_ready()
    async with service.channel() as channel:
        stream, ask = publisher(channel), asker(channel, blocks(1))
        await stream.send(blocks(1))
        await ask.until(known=True, blocks=1)
        with redis.Redis.from_url(server.url) as client:
            client.client_pause(1_500)
        await away(ask)
        await ask.until(known=True, blocks=1)


async def test_redis_is_not_there_yet(start_kvcache, start_redis, blocks, publisher, asker):
    server = start_redis()
    server.stop()
    service = start_kvcache(server.url).wait_ready()
    async with service.channel() as channel:
        stream, ask = publisher(channel), asker(channel, blocks(1))
        await away(ask)
        await stream.send(blocks(1))
        stats = await prefix_index_pb2_grpc.PrefixIndexStub(channel).Stats(pb.StatsRequest())
        assert not stats.store_available
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await prefix_index_pb2_grpc.PrefixIndexStub(channel).Forget(
                pb.ForgetRequest(engine_id="e", epoch_ms=1)
            )
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        server.launch()
        await stream.answer(lambda a: a.need_snapshot)
        await stream.send(blocks(1), part=0, last=True)
        await ask.until(known=True, blocks=1)


async def test_a_wrong_password_costs_hits_and_nothing_else(
    start_kvcache, start_redis, blocks, publisher, asker, tmp_path
):
    server = start_redis(settings={"requirepass": "right"})
    wrong, right = tmp_path / "wrong", tmp_path / "right"
    wrong.write_text("wrong")
    right.write_text("right\n")
    service = start_kvcache(server.url, redis_password_file=wrong).wait_ready()
    async with service.channel() as channel:
        await away(asker(channel, blocks(1)))
    assert "Redis is unavailable" in service.log
    assert "password" in service.log.lower()
    service = start_kvcache(server.url, redis_password_file=right).wait_ready()
    async with service.channel() as channel:
        stream, ask = publisher(channel), asker(channel, blocks(1))
        await stream.send(blocks(1))
        await ask.until(known=True, blocks=1)


async def test_a_full_redis_refuses_writes_and_answers_matches(
    start_kvcache, start_redis, blocks, publisher, asker
):
    server = start_redis()
    service = start_kvcache(server.url).wait_ready()
    async with service.channel() as channel:
        stream, ask = publisher(channel), asker(channel, blocks(1))
        await stream.send(blocks(1))
        await ask.until(known=True, blocks=1)
        with redis.Redis.from_url(server.url) as client:
            client.config_set("maxmemory-policy", "noeviction")
            client.config_set("maxmemory", 1)
            await stream.send(blocks(2))
            await ask.until(known=True, blocks=1)
            await asyncio.sleep(0)
            client.config_set("maxmemory", 0)
        await stream.answer(lambda a: a.need_snapshot)
        await stream.send(blocks(1, 2), part=0, last=True)
        await ask.until(known=True, blocks=1)


@pytest.mark.verify
@pytest.mark.timeout(180)
async def test_a_minute_without_redis(start_kvcache, start_redis, blocks, publisher, asker):
    server = start_redis()
    service = start_kvcache(server.url).wait_ready()
    async with service.channel() as channel:
        stream, ask = publisher(channel), asker(channel, blocks(1))
        await stream.send(blocks(1))
        await ask.until(known=True, blocks=1)
        server.kill()
        ends = time.monotonic() + 60
        slowest = 0.0
        while time.monotonic() < ends:
            known, _, took = await ask()
            assert not known or took < 0.1
            slowest = max(slowest, took)
            await stream.send(blocks(2))
            await asyncio.sleep(0.05)
        assert slowest < 0.5
        server.launch()
        await stream.answer(lambda a: a.need_snapshot)
        await stream.send(blocks(1), part=0, last=True)
        await ask.until(known=True, blocks=1)
