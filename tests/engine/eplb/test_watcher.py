"""An engine follows the map in a real etcd: takes what fits, refuses the rest, restores a loss."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from msgspec.structs import replace

from services.common.etcd.client import Etcd, Put
from services.engine.contract.messages import PlacementRejection, RoundReport
from services.engine.eplb.placement_map import Rejection, encode
from services.engine.eplb.placement_store import PlacementStore
from services.engine.eplb.watcher import PlacementWatcher
from tests.doubles.etcd_keys import delete_prefix

pytestmark = pytest.mark.services
OTHER = (3, 2, 1, 0, 3, 2)


class Engine:
    """A watcher whose core uses every map at once, unless `refuses` is set."""

    def __init__(self, store, shape, name):
        self.sent = []
        self.refuses = False
        self._changed = asyncio.Condition()
        self._news = asyncio.Event()
        self.watcher = PlacementWatcher(
            store,
            engine_id=name,
            model_revision="sha256:abc",
            shape=shape,
            send=self._core,
            on_applied=self._news.set,
        )

    @property
    def applied(self):
        return self.watcher.applied

    def _core(self, placement):
        self.sent.append(placement)
        loop = asyncio.get_running_loop()
        if self.refuses:
            no = PlacementRejection(placement.version, "rank 1 has no memory")
            report = RoundReport(
                step=1, placement_version=self.applied.version, placement_rejected=no
            )
        else:
            report = RoundReport(step=1, placement_version=placement.version)
        loop.call_soon(self.watcher.handle_report, report)

    async def until(self, holds):
        async with asyncio.timeout(30):
            while not holds(self.applied):
                self._news.clear()
                await self._news.wait()


@pytest.fixture
async def engine(store, shape):
    """Starts watchers on the store's group; `on` is another store."""
    async with AsyncExitStack() as stack:

        def start(name="engine-1", on=None):
            engine = Engine(on or store, shape, name)
            task = asyncio.create_task(engine.watcher.run())
            stack.push_async_callback(_end, task)
            return engine

        yield start


async def _end(task):
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()


def uses(version):
    return lambda applied: applied.version == version


def refused(version):
    return lambda applied: applied.rejected is not None and applied.rejected.version == version


async def test_a_map_that_was_there_before_and_one_that_comes(store, engine, make_map):
    await store.write(make_map(), await store.read())
    one = engine()
    await one.until(uses(1))
    await store.write(make_map(row=OTHER), await store.read())
    await one.until(uses(2))
    assert [message.version for message in one.sent] == [1, 2]
    assert one.sent[1].phy2log == (OTHER,) * 2
    assert one.sent[1].model_revision == "sha256:abc"


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (lambda m: b"not json", "cannot be read"),
        (lambda m: encode(replace(m, num_ranks=3)), "3 ranks"),
        (lambda m: encode(replace(m, model_revision="other")), "model revision 'other'"),
        (
            lambda m: encode(
                replace(m, phy2log=((0, 1, 2, 3, 0, 1), (0, 1, 2, 0, 0, 1)),
                        copies=((2, 2, 1, 1), (3, 2, 1, 0)))
            ),
            "layer 1: expert 3 has no slot",
        ),
        (lambda m: encode(m).replace(b'"manual"', b'"manual","x":1'), "unknown field `x`"),
    ],
)  # fmt: skip
async def test_a_bad_map_is_refused_by_all_and_the_old_one_stays(
    store, engine, make_map, raw, problem
):
    await store.write(make_map(), await store.read())
    engines = [engine("engine-1"), engine("engine-2")]
    for one in engines:
        await one.until(uses(1))
    await store.etcd.put(store.keys.map, raw(make_map(2)))
    for one in engines:
        await one.until(lambda applied: applied.rejected is not None)
        assert problem in one.applied.rejected.reason
        assert one.applied.version == 1
        assert [message.version for message in one.sent] == [1]
    await store.write(make_map(), await store.read())
    for one in engines:
        await one.until(lambda applied: applied.version > 1 and applied.rejected is None)


async def test_what_the_core_refuses_is_published(store, engine, make_map):
    one = engine()
    one.refuses = True
    await store.write(make_map(), await store.read())
    await one.until(refused(1))
    assert one.applied.rejected == Rejection(1, "rank 1 has no memory")
    assert one.applied.version == 0
    one.refuses = False
    await store.write(make_map(), await store.read())
    await one.until(uses(2))
    assert one.applied.rejected is None


async def test_of_several_maps_in_one_batch_the_last_counts(store, engine, make_map):
    one = engine()
    await store.write(make_map(), await store.read())
    await one.until(uses(1))
    # Written while no engine watches: a listing shows only the last.
    for _ in range(5):
        await store.write(make_map(), await store.read())
    await one.until(uses(6))
    versions = [message.version for message in one.sent]
    assert versions == sorted(set(versions))


async def test_a_deleted_map_comes_back_with_its_version(store, engine, make_map, read_until):
    engines = [engine("engine-1"), engine("engine-2")]
    for _ in range(3):
        await store.write(make_map(), await store.read())
    for one in engines:
        await one.until(uses(3))
    before = await store.read()
    await delete_prefix(store.etcd, store.keys.prefix)
    await _until_stored(read_until, store, before.current)
    state = await store.read()
    assert 3 in state.history
    assert (await store.write(make_map(row=OTHER), state)).version == 4
    for one in engines:
        await one.until(uses(4))
        assert [m.version for m in one.sent if m.version >= 3] == [3, 4]


async def test_with_a_refused_map_the_one_in_use_is_restored_as_well(
    store, engine, make_map, read_until
):
    one = engine()
    await store.write(make_map(), await store.read())
    await one.until(uses(1))
    good = (await store.read()).current
    one.refuses = True
    await store.write(make_map(row=OTHER), await store.read())
    await one.until(refused(2))
    bad = (await store.read()).current
    await delete_prefix(store.etcd, store.keys.prefix)
    await _until_stored(read_until, store, bad)
    assert (await store.read()).history == {1: good, 2: bad}


async def test_a_map_written_into_an_emptied_store_gets_the_next_version(
    store, engine, make_map, read_until
):
    one = engine()
    for _ in range(3):
        await store.write(make_map(created_unix_ms=1000), await store.read())
    await one.until(uses(3))
    fresh = make_map(1, row=OTHER, created_unix_ms=2000)
    await store.etcd.put(store.keys.map, encode(fresh))
    await one.until(uses(4))
    assert one.sent[-1].phy2log == (OTHER,) * 2
    await _until_stored(read_until, store, replace(fresh, version=4))


async def test_a_store_set_back_to_an_older_map_gets_the_known_one(
    store, engine, make_map, read_until
):
    one = engine()
    for number in range(3):
        await store.write(make_map(created_unix_ms=1000 + number), await store.read())
    await one.until(uses(3))
    state = await store.read()
    await store.etcd.transaction(
        [],
        [Put(store.keys.map, encode(state.history[1]))],
    )
    await _until_stored(read_until, store, state.current)
    assert one.applied.version == 3
    assert len([m for m in one.sent if m.version == 3]) == 1


async def test_etcd_away_and_back_empty(start_etcd, engine, make_map, read_until):
    server = start_etcd()
    etcd = Etcd([server.address], timeout_s=0.5)
    store = PlacementStore(etcd, "moe")
    engines = [engine(f"engine-{i}", on=store) for i in range(3)]
    await store.write(make_map(), await store.read())
    await store.write(make_map(row=OTHER), await store.read())
    for one in engines:
        await one.until(uses(2))
    known = (await store.read()).current
    server.kill()
    assert [one.applied.version for one in engines] == [2, 2, 2]
    server.erase()
    await asyncio.to_thread(server.launch)
    await _until_stored(read_until, store, known)
    state = await read_until(store)
    assert (await store.write(make_map(), state)).version == 3
    for one in engines:
        await one.until(uses(3))
        assert [message.version for message in one.sent][-1] == 3
    await etcd.close()


async def _until_stored(read_until, store, placement):
    await read_until(store, lambda state: state.current == placement)
