"""A front's block events in the real KV-cache service over a real Redis."""

import asyncio
import json
import sys

import grpc
import pytest

from inferfleet_proto.internal.v1 import prefix_index_pb2, prefix_index_pb2_grpc
from services.engine.contract.messages import RemovedBlocks, SendSnapshot, StoredBlocks


def block(n):
    return n.to_bytes(2, "big") * 16


def prompt(*numbers):
    return prefix_index_pb2.MatchRequest(block_hashes=b"".join(block(n)[:16] for n in numbers))


@pytest.fixture
async def index(redis_url, tmp_path):
    ready = tmp_path / "ready.json"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.kvcache", "--redis", redis_url),
        *("--ready-file", str(ready)),
    )
    async with asyncio.timeout(30):
        while not ready.exists():
            assert process.returncode is None
            await asyncio.sleep(0.05)
    address = json.loads(ready.read_text())["address"]
    async with grpc.aio.insecure_channel(address) as channel:
        yield address, prefix_index_pb2_grpc.PrefixIndexStub(channel)
    process.kill()
    await process.wait()


async def until(stub, request, blocks):
    async with asyncio.timeout(20):
        while True:
            answer = await stub.Match(request)
            found = {engine.engine_id: engine.matched_blocks for engine in answer.engines}
            if answer.known and found.get("engine-under-test", 0) == blocks:
                return
            await asyncio.sleep(0.02)


@pytest.mark.services
async def test_what_the_core_holds_is_what_the_index_matches(start_front, index):
    address, stub = index
    front = await start_front(kvcache=address)
    front.core.say(cache_events=[StoredBlocks(hashes=[block(1), block(2)], parent=None)])
    await until(stub, prompt(1, 2, 3), 2)
    front.core.say(cache_events=[StoredBlocks(hashes=[block(3)], parent=block(2))])
    await until(stub, prompt(1, 2, 3), 3)
    front.core.say(cache_events=[RemovedBlocks(hashes=[block(2)])])
    await until(stub, prompt(1, 2, 3), 1)


@pytest.mark.services
async def test_an_emptied_store_is_filled_again_by_an_idle_engine(start_front, index, redis_url):
    import redis.asyncio

    address, stub = index
    front = await start_front(kvcache=address)
    held = [StoredBlocks(hashes=[block(1), block(2)], parent=None)]
    front.core.say(cache_events=held)
    await until(stub, prompt(1, 2), 2)
    async with redis.asyncio.from_url(redis_url) as client:
        await client.flushall()
    await front.core.got(SendSnapshot)
    front.core.say(snapshot=held)
    await until(stub, prompt(1, 2), 2)
