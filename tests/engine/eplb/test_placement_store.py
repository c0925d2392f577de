"""The map in a real etcd: one of two writers wins, the history ends, a deposed leader is out."""

import asyncio

import pytest

from services.common.etcd.client import Changes, Etcd, EtcdUnavailableError
from services.common.etcd.election import Election
from services.engine.eplb.placement_map import Applied, PlacementMap, decode, encode
from services.engine.eplb.placement_store import (
    HISTORY,
    MapTooLargeError,
    PlacementStore,
    group_of,
    list_groups,
)

pytestmark = pytest.mark.services


def test_a_group_is_a_name_that_fits_into_a_key():
    assert group_of("Qwen/Qwen3 30B", "sha256:0123456789abcdef") == "Qwen-Qwen3-30B-0123456789ab"
    assert group_of("a", "sha256:01") != group_of("a", "sha256:02")
    assert "/" not in group_of("a/b", "r/1:x/y")


async def test_the_first_map_and_the_next(store, make_map):
    empty = await store.read()
    assert (empty.current, empty.mod_revision, empty.last_version) == (None, 0, 0)
    first = await store.write(make_map(), empty)
    assert first.version == 1
    second = await store.write(make_map(row=(3, 2, 1, 0, 3, 2)), await store.read())
    state = await store.read()
    assert state.current == second
    assert state.history == {1: first, 2: second}


async def test_of_two_writers_one_wins(store, make_map):
    state = await store.read()
    drafts = [make_map(author=f"writer {i}") for i in range(8)]
    written = await asyncio.gather(*(store.write(made, state) for made in drafts))
    (winner,) = [made for made in written if made is not None]
    after = await store.read()
    assert after.current == winner
    assert after.history == {1: winner}


async def test_the_history_is_bounded(store, make_map):
    for number in range(HISTORY + 3):
        assert await store.write(make_map(author=f"{number}"), await store.read())
    state = await store.read()
    assert state.history_versions == tuple(range(4, HISTORY + 4))
    assert state.current.version == HISTORY + 3
    assert state.history[4].author == "3"


async def test_the_map_and_its_history_come_in_one_batch(store, make_map):
    watch = store.etcd.watch_prefix(store.keys.prefix)
    async with asyncio.timeout(20):
        await anext(watch)
        written = await store.write(make_map(), await store.read())
        batch = await anext(watch)
    await watch.aclose()
    assert isinstance(batch, Changes)
    keys = {change.key: change.value.value for change in batch.changes}
    assert set(keys) == {store.keys.map, store.keys.history(1)}
    assert {decode(raw, PlacementMap) for raw in keys.values()} == {written}


async def test_a_deposed_leader_writes_no_map(store, make_map):
    election = Election(store.etcd, store.keys.leader, b"first", ttl_s=2)
    await election.start()
    term = await asyncio.wait_for(election.wait_elected(), 20)
    assert await store.write(make_map(), await store.read(), fence=term.fence)
    await store.etcd.delete(store.keys.leader)  # it does not know yet
    await store.etcd.put(store.keys.leader, b"second")
    state = await store.read()
    assert state.leader == "second"
    assert await store.write(make_map(), state, fence=term.fence) is None
    assert (await store.read()).current.version == 1
    assert await store.write(make_map(), state)
    await election.stop()


async def test_what_cannot_be_read_is_reported_and_written_over(store, make_map):
    first = await store.write(make_map(), await store.read())
    await store.etcd.put(store.keys.map, b'{"version": 41, "phy2log": "?"}')
    await store.etcd.put(store.keys.history(17), b"nonsense")
    await store.etcd.put(store.keys.applied("bad"), b"nonsense")
    await store.etcd.put(store.keys.applied("good"), encode(Applied(engine_id="good", version=1)))
    state = await store.read()
    assert state.current is None
    assert "phy2log" in state.problem
    assert state.newest == first
    assert (state.history_versions, list(state.history)) == ((1, 17), [1])
    assert list(state.applied) == ["good"]
    written = await store.write(make_map(), state)
    assert written.version == 42


async def test_a_map_that_etcd_would_not_take_is_not_sent(store, make_map):
    huge = make_map(load=((2**52,) * 4,) * 2, author="x" * 800_000)
    with pytest.raises(MapTooLargeError, match="bytes"):
        await store.write(huge, await store.read())
    assert (await store.read()).mod_revision == 0


async def test_restoring_puts_a_version_back_only_where_it_is_missing(store, make_map):
    lost, before = make_map(9), make_map(8)
    assert await store.restore(lost, [before], 0)
    assert not await store.restore(make_map(7), [], 0)
    state = await store.read()
    assert (state.current, state.history) == (lost, {8: before, 9: lost})
    assert (await store.write(make_map(), state)).version == 10


async def test_groups_are_separate(store, make_map, make_loads):
    other = PlacementStore(store.etcd, f"{store.keys.group}-2")
    await store.write(make_map(), await store.read())
    await other.etcd.put(other.keys.loads("engine-1"), encode(make_loads()))
    groups = await list_groups(store.etcd)
    assert groups[store.keys.group].current.version == 1
    assert not groups[store.keys.group].loads
    assert groups[other.keys.group].current is None
    assert groups[other.keys.group].loads["engine-1"].shape.num_slots == 6


async def test_an_etcd_that_is_away_is_an_error_and_nothing_is_half_written(start_etcd, make_map):
    server = start_etcd()
    etcd = Etcd([server.address], timeout_s=0.5)
    store = PlacementStore(etcd, "away")
    state = await store.read()
    server.pause()
    with pytest.raises(EtcdUnavailableError):
        await store.write(make_map(), state)
    server.resume()
    async with asyncio.timeout(20):
        while True:
            try:
                after = await store.read()
                break
            except EtcdUnavailableError:
                continue
    # The fate of that write is unknown; but both keys or none are there.
    assert (after.current is None) == (not after.history_versions)
    await etcd.close()


async def test_two_keys_in_one_transaction_are_seen_together(store, make_map):
    """A reader never sees a map whose history lacks it."""
    stop = asyncio.Event()

    async def write():
        for _ in range(10):
            await store.write(make_map(), await store.read())
        stop.set()

    writing = asyncio.create_task(write())
    seen = 0
    while not stop.is_set():
        state = await store.read()
        if state.current is not None:
            seen += 1
            assert state.history[state.current.version] == state.current
    await writing
    assert seen
