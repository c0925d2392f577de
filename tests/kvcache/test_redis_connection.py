"""Which servers are fit, and what a call costs when there is none."""

import asyncio
import contextlib
import logging
import shutil
import ssl
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis

from inferfleet_cli.supervisor.dev_backends import Binary, free_port
from services.kvcache.index import Status
from services.kvcache.redis_connection import RedisUnavailableError, UnsuitableRedisError
from services.kvcache.redis_server_check import problem_in

GOOD = {"redis_mode": "standalone", "redis_version": "7.0.15"}


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        (GOOD, None),
        ({**GOOD, "redis_version": "6.2.0"}, None),
        ({"server_mode": "standalone", "redis_version": "7.2.4", "valkey_version": "9.1.2"}, None),
        ({**GOOD, "redis_version": "6.0.16"}, "too old"),
        ({**GOOD, "redis_version": "5.0"}, "too old"),
        ({**GOOD, "redis_mode": "cluster"}, "cluster mode"),
        ({**GOOD, "redis_mode": "sentinel"}, r"redis+sentinel://"),
        ({"server_mode": "cluster", "redis_version": "7.2.4"}, "cluster mode"),
    ],
)
def test_fit_servers(info: dict, reason: str | None):
    found = problem_in(info)
    assert found is None if reason is None else reason in (found or "")


def test_a_policy_that_may_evict_epochs_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        problem_in({**GOOD, "maxmemory_policy": "volatile-lru", "maxmemory": 1000})
        problem_in({**GOOD, "maxmemory_policy": "allkeys-lru", "maxmemory": 0})
        assert not caplog.records
        problem_in({**GOOD, "maxmemory_policy": "allkeys-lru", "maxmemory": 1000})
    assert "allkeys-lru" in caplog.text


async def test_a_cluster_is_refused(open_index, start_redis):
    with pytest.raises(UnsuitableRedisError, match="single primary"):
        await open_index(start_redis(settings={"cluster-enabled": "yes"}).url)


async def test_an_absent_redis_is_an_answer_at_once(open_index):
    index = await open_index(f"redis://127.0.0.1:{free_port()}/0")
    began = time.monotonic()
    with pytest.raises(RedisUnavailableError):
        await index.match(bytes(16), False, 5.0)
    assert time.monotonic() - began < 0.5
    assert not index.available


async def test_a_slow_match_stops_matches_and_not_writes(open_index, start_redis, blocks):
    server = start_redis()
    index = await open_index(server.url)
    await index.apply(blocks.batch(1, blocks.stored(1)))
    server.pause()
    with pytest.raises(RedisUnavailableError):
        await index.match(blocks(1), False, 0.02)
    began = time.monotonic()
    with pytest.raises(RedisUnavailableError, match="too slow"):
        await index.match(blocks(1), False, 5.0)
    assert time.monotonic() - began < 0.5
    assert index.available
    server.resume()
    applied = await index.apply(blocks.batch(2, blocks.stored(2)))
    assert applied.status is Status.APPLIED
    async with asyncio.timeout(10):
        while True:
            with contextlib.suppress(RedisUnavailableError):
                assert len(await index.match(blocks(1, 2), False, 1.0)) == 1
                break
            await asyncio.sleep(0.02)


async def test_an_acl_user_with_only_what_is_needed(
    open_index, start_redis, blocks, matched, tmp_path
):
    server = start_redis()
    with redis.Redis.from_url(server.url) as client:
        commands = (
            "+@connection +evalsha +eval +script|load +get +set +del +mget +expire +hget +hset "
            "+hdel +hgetall +hexists +hkeys +hincrby +time +scan"
        )
        client.execute_command(*f"ACL SETUSER kv on >pw ~if1:* -@all {commands}".split())
    index = await open_index(server.url.replace("//", "//kv@"), password="pw")
    await index.apply(blocks.batch(1, blocks.stored(1), blocks.removed(9), blocks.cleared))
    await index.apply(blocks.batch(2, blocks.stored(1)))
    assert await matched(index, blocks(1)) == {"e": 1}
    await index.touch(["e"], 60)
    await index.scan(0, 10)
    await index.forget("e", 1)


@pytest.fixture
async def tls_front(redis_url, certificates):
    """Port of a front that ends TLS, wants a client certificate and passes on to Redis.

    The wheel's Valkey is built without TLS.
    """
    wanted = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    wanted.load_cert_chain(certificates.cert, certificates.key)
    wanted.load_verify_locations(certificates.ca)
    wanted.verify_mode = ssl.CERT_REQUIRED
    host, port = urlsplit(redis_url).hostname, urlsplit(redis_url).port

    async def copy(reader, writer):
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def pass_on(reader, writer):
        behind_reader, behind_writer = await asyncio.open_connection(host, port)
        await asyncio.gather(copy(reader, behind_writer), copy(behind_reader, writer))

    server = await asyncio.start_server(pass_on, "127.0.0.1", 0, ssl=wanted)
    yield server.sockets[0].getsockname()[1]
    server.close()


async def test_tls_with_a_client_certificate(open_index, tls_front, certificates):
    url = f"rediss://127.0.0.1:{tls_front}/0"
    ca, cert, key = (str(path) for path in certificates)
    member = await open_index(url, tls_ca=ca, tls_cert=cert, tls_key=key)
    assert member.available
    assert await member.match(bytes(16), False, 1.0) == []
    assert not (await open_index(url, tls_ca=ca)).available
    assert not (await open_index(url, tls_cert=cert, tls_key=key)).available


@pytest.mark.tools
async def test_a_redis_server_on_path(open_index, start_redis, blocks, matched):
    found = shutil.which("redis-server")
    assert found, "redis-server is not on PATH (Debian: apt-get install redis-server)"
    server = start_redis(binary=Binary(Path(found), "path", ""))
    index = await open_index(server.url)
    applied = await index.apply(blocks.batch(1, blocks.stored(1), blocks.removed(2)))
    assert applied.status is Status.APPLIED
    assert await matched(index, blocks(1)) == {"e": 1}
