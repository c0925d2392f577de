"""The index's rules, against a real Redis: prefixes, epochs, gaps, snapshots, fences, caps."""

import redis

from services.kvcache.events import HISTORY, STATE
from services.kvcache.index import PrefixIndex, Status


async def test_match_is_the_longest_contiguous_prefix_of_each_engine(index, blocks, matched):
    await index.apply(blocks.batch(1, blocks.stored(1, 2, 3, 5), engine="a"))
    await index.apply(blocks.batch(1, blocks.stored(1), engine="b"))
    await index.apply(blocks.batch(1, blocks.stored(2, 3), engine="c"))
    assert await matched(index, blocks(1, 2, 3, 4, 5)) == {"a": 3, "b": 1}
    assert await matched(index, blocks(9)) == {}
    assert await matched(index, blocks(2, 3)) == {"a": 2, "c": 2}


async def test_a_long_prompt_is_matched_over_several_chunks(index, blocks, matched):
    names = range(1_500)
    await index.apply(blocks.batch(1, blocks.stored(*names), engine="a"))
    await index.apply(blocks.batch(1, blocks.stored(*names[:256]), engine="b"))
    await index.apply(blocks.batch(1, blocks.stored(*names[:1_001]), engine="c"))
    assert await matched(index, blocks(*names)) == {"a": 1_500, "b": 256, "c": 1_001}


async def test_removed_blocks_end_the_prefix(index, blocks, matched):
    await index.apply(blocks.batch(1, blocks.stored(1, 2, 3)))
    await index.apply(blocks.batch(2, blocks.removed(2)))
    assert await matched(index, blocks(1, 2, 3)) == {"e": 1}
    await index.apply(blocks.batch(3, blocks.removed(1, 3)))
    assert await matched(index, blocks(1, 2, 3)) == {}
    assert await index.num_entries() == 0


async def test_state_is_needed_at_the_boundary_only_if_requested(index, blocks, matched):
    await index.apply(
        blocks.batch(1, blocks.stored(1, 2, 3, 4), blocks.stored(2, kind=STATE), engine="a")
    )
    await index.apply(blocks.batch(1, blocks.stored(1, 2, 3, 4), engine="b"))
    await index.apply(blocks.batch(1, blocks.stored(1, 2, 3, kind=STATE), engine="c"))
    prompt = blocks(1, 2, 3, 4)
    assert await matched(index, prompt) == {"a": 4, "b": 4}
    assert await matched(index, prompt, needs_state=True) == {"a": 2}
    await index.apply(blocks.batch(2, blocks.removed(2, kind=STATE), engine="a"))
    assert await matched(index, prompt, needs_state=True) == {}
    await index.apply(blocks.batch(3, blocks.stored(4, kind=STATE), engine="a"))
    assert await matched(index, prompt, needs_state=True) == {"a": 4}
    await index.apply(blocks.batch(4, blocks.removed(1, kind=HISTORY | STATE), engine="a"))
    assert await matched(index, prompt, needs_state=True) == {}


async def test_clear_is_one_write_and_order_within_a_batch_counts(
    index: PrefixIndex, blocks, matched, redis_url
):
    names = range(3_000)
    await index.apply(blocks.batch(1, blocks.stored(*names)))
    with redis.Redis.from_url(redis_url) as client:
        client.config_resetstat()
        await index.apply(blocks.batch(2, blocks.stored(9_000), blocks.cleared, blocks.stored(1)))
        commands = client.info("commandstats")
    assert "cmdstat_del" not in commands
    assert commands["cmdstat_set"]["calls"] == 2
    assert await matched(index, blocks(1)) == {"e": 1}
    assert await matched(index, blocks(*names)) == {}
    assert await matched(index, blocks(9_000)) == {}


async def test_a_gap_is_refused_and_a_snapshot_repairs_it(index, blocks, matched):
    await index.apply(blocks.batch(1, blocks.stored(1, 2)))
    gap = await index.apply(blocks.batch(3, blocks.stored(3)))
    assert (gap.status, gap.acked) == (Status.GAP, 1)
    assert await matched(index, blocks(1, 2, 3)) == {"e": 2}
    part = await index.apply(blocks.batch(4, blocks.stored(1), part=0))
    assert (part.status, part.acked) == (Status.APPLIED, 4)
    assert await matched(index, blocks(1, 2)) == {"e": 2}, "a part is not seen before the last"
    await index.apply(blocks.batch(5, blocks.stored(7), part=1, last_part=True))
    assert await matched(index, blocks(1, 2)) == {"e": 1}
    assert await matched(index, blocks(7)) == {"e": 1}
    assert (await index.apply(blocks.batch(6, blocks.stored(2)))).status is Status.APPLIED
    assert await matched(index, blocks(1, 2)) == {"e": 2}


async def test_a_snapshot_with_a_missing_part_is_not_taken(index, blocks, matched):
    await index.apply(blocks.batch(1, blocks.stored(1)))
    await index.apply(blocks.batch(2, blocks.stored(5), part=0))
    assert (await index.apply(blocks.batch(4, part=2, last_part=True))).status is Status.GAP
    assert (await index.apply(blocks.batch(3, part=2, last_part=True))).status is Status.GAP
    assert (await index.apply(blocks.batch(3, blocks.stored(9)))).status is Status.GAP
    assert await matched(index, blocks(1)) == {"e": 1}
    await index.apply(blocks.batch(5, blocks.stored(6), part=0, last_part=True))
    assert await matched(index, blocks(1)) == {}
    assert await matched(index, blocks(5)) == {}, "the abandoned snapshot is void"
    assert await matched(index, blocks(6)) == {"e": 1}


async def test_a_repeated_batch_is_acknowledged_and_not_applied_again(index, blocks, matched):
    await index.apply(blocks.batch(1, blocks.stored(1)))
    await index.apply(blocks.batch(2, blocks.removed(1)))
    again = await index.apply(blocks.batch(1, blocks.stored(1)))
    assert (again.status, again.acked) == (Status.DUPLICATE, 2)
    assert await matched(index, blocks(1)) == {}


async def test_a_new_epoch_ends_the_old_one_and_fences_its_writer(index, blocks, matched):
    await index.apply(blocks.batch(1, blocks.stored(1, 2), epoch=10))
    await index.apply(blocks.batch(1, blocks.cleared, blocks.stored(1), epoch=11))
    assert await matched(index, blocks(1, 2)) == {"e": 1}
    for late in (
        blocks.batch(2, blocks.stored(2), epoch=10),
        blocks.batch(1, blocks.stored(2), epoch=10),
        blocks.batch(3, blocks.stored(2), epoch=10, part=0, last_part=True),
    ):
        assert (await index.apply(late)).status is Status.STALE
    assert await matched(index, blocks(1, 2)) == {"e": 1}
    assert [m.epoch_ms for m in await index.match(blocks(1), False, 1.0)] == [11]


async def test_epochs_compare_as_numbers(index, blocks):
    await index.apply(blocks.batch(1, epoch=9_999_999_999_999))
    applied = await index.apply(blocks.batch(1, epoch=10_000_000_000_000))
    assert applied.status is Status.APPLIED
    assert (await index.apply(blocks.batch(2, epoch=9_999_999_999_999))).status is Status.STALE


async def test_an_unknown_epoch_must_begin_at_its_beginning(index, blocks, matched):
    assert (await index.apply(blocks.batch(2, blocks.stored(1)))).status is Status.GAP
    assert (await index.apply(blocks.batch(2, part=1, last_part=True))).status is Status.GAP
    await index.apply(blocks.batch(1, blocks.stored(1), epoch=5))
    assert (await index.apply(blocks.batch(7, blocks.stored(1), epoch=6))).status is Status.GAP
    assert await matched(index, blocks(1)) == {}, "a newer life has shown itself: the old is gone"
    assert (await index.apply(blocks.batch(2, blocks.stored(1), epoch=5))).status is Status.STALE


async def test_forget_drops_all_and_keeps_the_fence(index, blocks, matched):
    await index.apply(blocks.batch(1, blocks.stored(1), epoch=5))
    assert not await index.forget("e", 4)
    assert await matched(index, blocks(1)) == {"e": 1}
    assert await index.forget("e", 5)
    assert not await index.forget("e", 5)
    assert await matched(index, blocks(1)) == {}
    assert (await index.apply(blocks.batch(2, epoch=4, part=0))).status is Status.STALE
    assert (await index.apply(blocks.batch(2, blocks.stored(1), epoch=5))).status is Status.GAP
    await index.apply(blocks.batch(3, blocks.stored(1), epoch=5, part=0, last_part=True))
    assert await matched(index, blocks(1)) == {"e": 1}


async def test_a_batch_larger_than_one_script_counts_with_its_last_piece(index, blocks, matched):
    names = range(2_500)
    await index.apply(blocks.batch(1, blocks.cleared, blocks.stored(*names)))
    assert await matched(index, blocks(*names)) == {"e": 2_500}
    await index.apply(blocks.batch(4, blocks.stored(*names[:1_200]), part=0, last_part=True))
    assert await matched(index, blocks(*names)) == {"e": 1_200}
    await index.apply(blocks.batch(5, blocks.removed(*names[100:])))
    assert await matched(index, blocks(*names)) == {"e": 100}


async def test_a_store_emptied_between_two_pieces_keeps_nothing_of_the_batch(
    index, blocks, matched, redis_url, monkeypatch
):
    original, calls = index._run_script, []

    async def emptied_before_the_second(name, arguments):
        calls.append(name)
        if len(calls) == 2:
            with redis.Redis.from_url(redis_url) as client:
                client.flushall()
        return await original(name, arguments)

    monkeypatch.setattr(index, "_run_script", emptied_before_the_second)
    batch = blocks.batch(1, blocks.stored(*range(1_500)), part=0, last_part=True)
    assert (await index.apply(batch)).status is Status.GAP
    assert await matched(index, blocks(*range(1_000, 1_500))) == {}
    assert await index.owners() == {}


async def test_a_lost_counter_gives_no_token_twice(index, blocks, matched, redis_url):
    await index.apply(blocks.batch(1, blocks.stored(1), engine="a"))
    with redis.Redis.from_url(redis_url) as client:
        client.delete(index.meta_key, index.owners_key, index.live_key)
    await index.apply(blocks.batch(1, blocks.stored(2), engine="b"))
    assert await matched(index, blocks(1)) == {}, "an orphan's token belongs to no engine"
    assert (await index.apply(blocks.batch(2, engine="a"))).status is Status.GAP


async def test_losing_the_live_names_alone_asks_for_a_snapshot(index, blocks, matched, redis_url):
    await index.apply(blocks.batch(1, blocks.stored(1)))
    with redis.Redis.from_url(redis_url) as client:
        client.delete(index.live_key)
    assert await matched(index, blocks(1)) == {}
    assert (await index.apply(blocks.batch(2, blocks.stored(2)))).status is Status.GAP


async def test_the_cap_refuses_new_blocks_and_nothing_else(open_index, redis_url, blocks, matched):
    index = await open_index(redis_url, max_entries=3)
    applied = await index.apply(blocks.batch(1, blocks.stored(1, 2, 3, 4, 5), engine="a"))
    assert (applied.status, applied.refused_entries) == (Status.APPLIED, 2)
    await index.apply(blocks.batch(1, blocks.stored(1, 2), engine="b"))
    assert await matched(index, blocks(1, 2, 3, 4)) == {"a": 3, "b": 2}
    assert await index.num_entries() == 3


async def test_silent_engines_lose_their_record(index, blocks, matched):
    await index.apply(blocks.batch(1, blocks.stored(1), engine="a"))
    assert await index.touch(["a"], silence_s=60) == 0
    assert await index.touch([], silence_s=-1) == 1
    assert await index.owners() == {}
    assert await matched(index, blocks(1)) == {}


async def test_entries_may_expire_and_epochs_may_not(index, blocks, redis_url):
    await index.apply(blocks.batch(1, blocks.stored(1)))
    with redis.Redis.from_url(redis_url) as client:
        assert 0 < client.ttl(index.entry_prefix.encode() + blocks(1)) <= 3600
        for key in (index.owners_key, index.live_key, index.meta_key):
            assert client.ttl(key) == -1


async def test_an_entry_costs_less_than_its_budget(index, blocks, redis_url):
    with redis.Redis.from_url(redis_url) as client:
        before = client.info("memory")["used_memory"]
        await index.apply(blocks.batch(1, blocks.stored(*range(20_000))))
        used = client.info("memory")["used_memory"] - before
    assert used / 20_000 <= 200
