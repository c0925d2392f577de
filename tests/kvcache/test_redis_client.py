"""Commands over the pool's own connections: no reply is ever taken for another's."""

import asyncio

import pytest
import redis
from redis.asyncio import BlockingConnectionPool
from redis.exceptions import ResponseError

from services.kvcache.redis_client import Client, encode


@pytest.fixture
async def client(redis_url):
    opened = Client(BlockingConnectionPool.from_url(redis_url, protocol=2, socket_timeout=1.0))
    yield opened
    await opened.drop()
    await opened.aclose()


def echo(word: bytes) -> bytes:
    return encode(b"ECHO", word)


async def test_replies_come_in_order_and_connections_are_used_again(client, redis_url):
    for i in range(3):
        words = [b"%d" % i, b"", b"\r\n\x00", bytes(100_000)]
        assert await client.send(b"".join(map(echo, words)), len(words)) == words
    together = await asyncio.gather(*(client.send(echo(b"%d" % i), 1) for i in range(100)))
    assert together == [[b"%d" % i] for i in range(100)]
    with redis.Redis.from_url(redis_url) as other:
        assert len(other.client_list()) <= 1 + 64


async def test_after_an_error_reply_nothing_is_left_to_be_misread(client):
    with pytest.raises(ResponseError):
        await client.send(encode(b"NO-SUCH") + echo(b"late"), 2)
    assert await client.send(echo(b"next"), 1) == [b"next"]


async def test_after_giving_up_nothing_is_left_to_be_misread(client, redis_url):
    assert await client.send(echo(b"first"), 1) == [b"first"]
    sending = asyncio.create_task(
        client.send(encode(b"BLPOP", b"nothing", b"0") + echo(b"late"), 2)
    )
    with redis.Redis.from_url(redis_url) as other:
        async with asyncio.timeout(10):
            while not other.info("clients")["blocked_clients"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert await client.send(echo(b"next"), 1) == [b"next"]


async def test_a_connection_that_the_server_closed_is_made_again(client, redis_url):
    assert await client.send(echo(b"first"), 1) == [b"first"]
    with redis.Redis.from_url(redis_url) as other:
        assert other.client_kill_filter(_type="normal", skipme=True) >= 1
    async with asyncio.timeout(10):
        while not await client._idle[0].can_read():  # its end has not been seen yet  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await client.send(echo(b"next"), 1) == [b"next"]


async def test_it_connects_again_after_being_dropped(client):
    assert await client.send(echo(b"first"), 1) == [b"first"]
    await client.drop()
    assert await client.send(echo(b"next"), 1) == [b"next"]
