"""What the background sweep removes, renews, counts and gives up."""

import redis

from services.kvcache.index import PrefixIndex
from services.kvcache.metrics import KvCacheMetrics
from services.kvcache.sweeper import BATCH, Sweeper, Swept


def sweeper_of(index: PrefixIndex) -> Sweeper:
    return Sweeper(index, KvCacheMetrics(), interval_s=60)


async def test_a_cleared_owners_entries_are_removed_in_small_batches(
    index, blocks, matched, redis_url, monkeypatch
):
    names = range(2_000)
    await index.apply(blocks.batch(1, blocks.stored(*names), engine="a"))
    await index.apply(blocks.batch(1, blocks.stored(*names[:700]), engine="b"))
    await index.apply(blocks.batch(2, blocks.cleared, engine="a"))
    original, sizes = index._run_script, []

    async def measured(name, arguments):
        sizes.append(len(arguments) - 2)
        return await original(name, arguments)

    monkeypatch.setattr(index, "_run_script", measured)
    assert await sweeper_of(index).sweep() == Swept(seen=2_000, deleted=1_300, given_up=0)
    assert max(sizes) <= BATCH <= 1_000
    assert await matched(index, blocks(*names)) == {"b": 700}
    assert await index.num_entries() == 700
    with redis.Redis.from_url(redis_url) as client:
        assert client.strlen(index.entry_prefix.encode() + blocks(1)) == 7


async def test_owned_entries_are_renewed(index, blocks, redis_url):
    await index.apply(blocks.batch(1, blocks.stored(1)))
    key = index.entry_prefix.encode() + blocks(1)
    with redis.Redis.from_url(redis_url) as client:
        client.expire(key, 5)
        await sweeper_of(index).sweep()
        assert client.ttl(key) > 3_000


async def test_a_snapshot_under_way_is_not_swept(index, blocks, matched):
    await index.apply(blocks.batch(1, blocks.stored(1)))
    await index.apply(blocks.batch(2, blocks.stored(1, 2), part=0))
    await sweeper_of(index).sweep()
    await index.apply(blocks.batch(3, part=1, last_part=True))
    assert await matched(index, blocks(1, 2)) == {"e": 2}


async def test_a_full_index_is_brought_below_its_cap(open_index, redis_url, blocks):
    index = await open_index(redis_url, max_entries=2_000)
    await index.apply(blocks.batch(1, blocks.stored(*range(2_500))))
    assert await index.num_entries() == 2_000
    swept = await sweeper_of(index).sweep()
    assert 50 <= swept.given_up <= 200
    assert await index.num_entries() == 2_000 - swept.given_up


async def test_the_count_is_corrected_for_what_redis_evicted(index, blocks, redis_url):
    await index.apply(blocks.batch(1, blocks.stored(*range(1_000))))
    with redis.Redis.from_url(redis_url) as client:
        client.delete(*(index.entry_prefix.encode() + blocks(name) for name in range(400)))
    assert await index.num_entries() == 1_000
    await sweeper_of(index).sweep()
    assert await index.num_entries() == 600


async def test_other_users_of_the_database_are_left_alone(index, blocks, redis_url):
    with redis.Redis.from_url(redis_url) as client:
        client.set("if1:bother", "x")
        client.set("someone:else", "y")
        await index.apply(blocks.batch(1, blocks.stored(1)))
        await index.forget("e", 1)
        assert await sweeper_of(index).sweep() == Swept(seen=1, deleted=1, given_up=0)
        assert client.get("if1:bother") == b"x"
        assert client.get("someone:else") == b"y"
