"""What the background sweep removes, renews, counts and gives up."""

import redis

from services.kvcache.index import PrefixIndex
from services.kvcache.metrics import Metrics
from services.kvcache.sweep import BATCH, Sweeper, Swept


def sweeper_of(store, max_entries: int = 100_000) -> Sweeper:
    return Sweeper(store, Metrics(), entry_ttl_s=3600, max_entries=max_entries, interval_s=60)


async def test_a_cleared_owners_entries_are_removed_in_small_batches(
    store, index, blocks, matched, redis_url, monkeypatch
):
    names = range(2_000)
    await index.apply(blocks.batch(1, blocks.stored(*names), engine="a"))
    await index.apply(blocks.batch(1, blocks.stored(*names[:700]), engine="b"))
    await index.apply(blocks.batch(2, blocks.cleared, engine="a"))
    original, sizes = store.script, []

    async def measured(name, arguments):
        sizes.append(len(arguments) - 2)
        return await original(name, arguments)

    monkeypatch.setattr(store, "script", measured)
    assert await sweeper_of(store).sweep() == Swept(seen=2_000, deleted=1_300, given_up=0)
    assert max(sizes) <= BATCH <= 1_000
    assert await matched(index, blocks(*names)) == {"b": 700}
    assert await index.num_entries() == 700
    with redis.Redis.from_url(redis_url) as client:
        assert client.strlen(store.entry_prefix.encode() + blocks(1)) == 7


async def test_owned_entries_are_renewed(store, index, blocks, redis_url):
    await index.apply(blocks.batch(1, blocks.stored(1)))
    key = store.entry_prefix.encode() + blocks(1)
    with redis.Redis.from_url(redis_url) as client:
        client.expire(key, 5)
        await sweeper_of(store).sweep()
        assert client.ttl(key) > 3_000


async def test_a_snapshot_under_way_is_not_swept(store, index, blocks, matched):
    await index.apply(blocks.batch(1, blocks.stored(1)))
    await index.apply(blocks.batch(2, blocks.stored(1, 2), part=0))
    await sweeper_of(store).sweep()
    await index.apply(blocks.batch(3, part=1, last_part=True))
    assert await matched(index, blocks(1, 2)) == {"e": 2}


async def test_a_full_index_is_brought_below_its_cap(store, blocks):
    index = PrefixIndex(store, entry_ttl_s=3600, max_entries=2_000)
    await index.apply(blocks.batch(1, blocks.stored(*range(2_500))))
    assert await index.num_entries() == 2_000
    swept = await sweeper_of(store, max_entries=2_000).sweep()
    assert 50 <= swept.given_up <= 200
    assert await index.num_entries() == 2_000 - swept.given_up


async def test_the_count_is_corrected_for_what_redis_evicted(store, index, blocks, redis_url):
    await index.apply(blocks.batch(1, blocks.stored(*range(1_000))))
    with redis.Redis.from_url(redis_url) as client:
        client.delete(*(store.entry_prefix.encode() + blocks(name) for name in range(400)))
    assert await index.num_entries() == 1_000
    await sweeper_of(store).sweep()
    assert await index.num_entries() == 600


async def test_other_users_of_the_database_are_left_alone(store, index, blocks, redis_url):
    with redis.Redis.from_url(redis_url) as client:
        client.set("if1:bother", "x")
        client.set("someone:else", "y")
        await index.apply(blocks.batch(1, blocks.stored(1)))
        await index.forget("e", 1)
        assert await sweeper_of(store).sweep() == Swept(seen=1, deleted=1, given_up=0)
        assert client.get("if1:bother") == b"x"
        assert client.get("someone:else") == b"y"
