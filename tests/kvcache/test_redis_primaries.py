"""How `redis` is read, and a primary that dies: by a list of URLs and by Sentinels."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from inferfleet_cli.supervisor.dev_backends import RedisProcess
from services.kvcache.index import PrefixIndex
from services.kvcache.redis_connection import RedisUnavailableError
from services.kvcache.redis_primaries import Primaries, Sentinels, parse_redis_url

A, B = "redis://a:1/0", "redis://u@b:2/0"


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (A, Primaries(urls=(A,))),
        (f"{A}, {B}", Primaries(urls=(A, B))),
        (
            "unix:///run/redis,with/comma.sock",
            Primaries(urls=("unix:///run/redis,with/comma.sock",)),
        ),
        (
            "redis+sentinel://u@s1:5,s2,[::1]:7/main/3",
            Primaries(
                sentinels=Sentinels(
                    (("s1", 5), ("s2", 26379), ("::1", 7)), "main", "redis", "u", "3"
                )
            ),
        ),
        (
            "rediss+sentinel://s1/main",
            Primaries(sentinels=Sentinels((("s1", 26379),), "main", "rediss", "", "0")),
        ),
    ],
)
def test_reads(text: str, read: Primaries):
    assert parse_redis_url(text) == read


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("http://a", "expected redis://"),
        (f"{A},http://b", "expected redis://"),
        ("redis://:secret@a:1/0", "redis_password_file"),
        ("redis://a:1/0?password=x", "redis_password_file"),
        ("redis://a:x/0", "a port from 1"),
        (f"{A},redis://b:99999/0", "a port from 1"),
        ("redis://a:1/x", "number of a database"),
        ("unix:///run/x.sock?db=x", "number of a database"),
        ("redis+sentinel://s1:99999/main", "a port from 1"),
        ("redis+sentinel://s1:5", "name the primary"),
        ("redis+sentinel://s1:5/main/x", "number of a database"),
        ("redis+sentinel://s1:port/main", "host:port"),
        (f"redis+sentinel://s1/main,{A}", "expected the Sentinels as one URL"),
        (f"{A},redis+sentinel://s1/main", "cannot be combined"),
    ],
)
def test_refuses(text: str, why: str):
    with pytest.raises(ValueError, match=why):
        parse_redis_url(text)


def test_url_of_what_sentinels_name():
    sentinels = parse_redis_url("redis+sentinel://u@s1/main/3").sentinels
    assert sentinels is not None
    assert sentinels.url_of("10.0.0.1", 7) == "redis://u@10.0.0.1:7/3"
    assert sentinels.url_of("::1", 7) == "redis://u@[::1]:7/3"


# A replica is sent its copy now, not with others that may ask within 5 s.
AT_ONCE = {"repl-diskless-sync-delay": "0"}
Start = Callable[..., RedisProcess]


def replica_of(primary: RedisProcess, start_redis: Start) -> RedisProcess:
    server = start_redis(settings={"replicaof": f"127.0.0.1 {primary.port}"})
    deadline = time.monotonic() + 20
    with redis.Redis.from_url(server.url) as client:
        while client.info("replication")["master_link_status"] != "up":
            assert time.monotonic() < deadline, server.log_path.read_text()
            time.sleep(0.02)
    return server


async def until(question: Callable[[], Any], within_s: float = 30.0) -> None:
    """Ask until the answer is true; Redis being away is a no."""
    async with asyncio.timeout(within_s):
        while True:
            with contextlib.suppress(RedisUnavailableError):
                if await question():
                    return
            await asyncio.sleep(0.02)


async def written(index: PrefixIndex) -> bool:
    await index.adjust_entries(1)
    return await index.num_entries() == 1


async def test_the_first_primary_of_a_list_is_used(open_index, start_redis):
    primary = start_redis(settings=AT_ONCE)
    replica = replica_of(primary, start_redis)
    index = await open_index(f"{replica.url},{primary.url}")
    await index.adjust_entries(3)
    with redis.Redis.from_url(primary.url) as client:
        assert client.hget("if1:meta", "entries") == b"3"


async def test_a_lone_replica_is_away_and_not_written_to(open_index, start_redis):
    replica = replica_of(start_redis(settings=AT_ONCE), start_redis)
    index = await open_index(replica.url)
    assert not index.available
    with redis.Redis.from_url(replica.url) as client:
        client.replicaof("NO", "ONE")
    await until(lambda: written(index))


@pytest.mark.parametrize("how", ["killed", "paused", "demoted"])
async def test_a_promoted_replica_is_taken_and_brought_up_to_date(
    how, start_kvcache, start_redis, blocks, publisher, asker
):
    primary = start_redis(settings=AT_ONCE)
    replica = replica_of(primary, start_redis)
    service = start_kvcache(f"{primary.url},{replica.url}").wait_ready()
    async with service.channel() as channel:
        stream, ask = publisher(channel), asker(channel, blocks(1, 2, 3))
        await stream.send(blocks(1))
        await ask.until(known=True, blocks=1)
        with redis.Redis.from_url(replica.url) as client:
            # The replica misses the last write: it must not pass for the whole index.
            client.replicaof("NO", "ONE")
            await stream.send(blocks(2))
            await ask.until(known=True, blocks=2)
            if how == "killed":
                primary.kill()
            elif how == "paused":
                primary.pause()
            else:
                with redis.Redis.from_url(primary.url) as old:
                    old.replicaof("127.0.0.1", str(replica.port))
        await stream.answer(lambda a: a.need_snapshot)
        await stream.send(blocks(1, 2, 3), part=0, last=True)
        await ask.until(known=True, blocks=3)
    assert f"primary: 127.0.0.1:{replica.port}" in service.log
    assert service.process.poll() is None


class SentinelProcess(RedisProcess):
    """Redis's own watcher: the same binary, which also rewrites its configuration."""

    def _arguments(self) -> list[str]:
        path = self.directory / "sentinel.conf"
        lines = {"bind": "127.0.0.1", "port": str(self.port), **self._settings}
        path.write_text("".join(f"{key} {value}\n" for key, value in lines.items()))
        return [str(path), "--sentinel"]


@pytest.fixture
def start_sentinels(tmp_path: Path) -> Iterator[Callable[[RedisProcess], list[RedisProcess]]]:
    started: list[RedisProcess] = []

    def start(primary: RedisProcess) -> list[RedisProcess]:
        settings = {
            "sentinel monitor": f"main 127.0.0.1 {primary.port} 2",
            "sentinel down-after-milliseconds": "main 500",
            "sentinel failover-timeout": "main 4000",
        }
        for i in range(3):
            folder = tmp_path / f"sentinel{i}"
            started.append(SentinelProcess.start(folder, settings=settings))
        return started

    yield start
    for sentinel in started:
        sentinel.kill()


async def test_sentinels_promote_and_are_followed(
    start_kvcache, start_redis, start_sentinels, blocks, publisher, asker
):
    primary = start_redis(settings=AT_ONCE)
    replica = replica_of(primary, start_redis)
    sentinels = start_sentinels(primary)
    await sentinels_know(sentinels)
    hosts = ",".join(sentinel.address for sentinel in sentinels)
    service = start_kvcache(f"redis+sentinel://{hosts}/main/0").wait_ready()
    async with service.channel() as channel:
        stream, ask = publisher(channel), asker(channel, blocks(1, 2))
        await stream.send(blocks(1))
        await ask.until(known=True, blocks=1)
        sentinels[0].kill()  # the other two are a majority
        primary.kill()
        await ask.until(known=True, blocks=1, within_s=40)  # replicated before: nothing was lost
        await stream.send(blocks(2))
        await ask.until(known=True, blocks=2)
    assert f"primary: 127.0.0.1:{replica.port}" in service.log


async def sentinels_know(sentinels: list[RedisProcess]) -> None:
    """Until each knows the replica and the other Sentinels."""
    async with asyncio.timeout(30):
        for sentinel in sentinels:
            with redis.Redis(port=sentinel.port) as client:
                while True:
                    found = client.sentinel_master("main")
                    if found["num-other-sentinels"] == 2 and found["num-slaves"] == 1:
                        break
                    await asyncio.sleep(0.05)
