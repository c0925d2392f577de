"""The leader writes a map that pays, once; others and deposed ones do not."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from services.common.etcd.client import Etcd, EtcdError
from services.common.etcd.election import Leadership
from services.engine.eplb.controller import PlacementController
from services.engine.eplb.placement_map import Applied, encode, problem_with
from services.engine.eplb.placement_store import PlacementStore
from services.engine.eplb.planning import PlanSettings

pytestmark = pytest.mark.services
SKEWED = (10, 10, 700, 10)


def controller_on(store, shape, name="engine-1", interval_s=0.05, **settings):
    return PlacementController(
        store,
        engine_id=name,
        model="moe",
        model_revision="sha256:abc",
        shape=shape,
        settings=PlanSettings(**settings),
        interval_s=interval_s,
    )


@pytest.fixture
async def running(store, shape):
    async with AsyncExitStack() as stack:

        async def start(name, on=None, **settings):
            controller = controller_on(on or store, shape, name, **settings)
            await controller.start()
            task = asyncio.create_task(controller.run())

            async def end():
                task.cancel()
                await asyncio.wait({task})
                assert task.cancelled()
                await controller.close()

            stack.push_async_callback(end)
            return controller, end

        yield start


async def _says(store, record):
    kind = store.keys.applied if isinstance(record, Applied) else store.keys.loads
    await store.etcd.put(kind(record.engine_id), encode(record))


async def test_one_of_three_writes_one_map(store, shape, running, make_loads, read_until):
    await _says(store, make_loads("a", SKEWED))
    await _says(store, make_loads("b", SKEWED))
    names = ("engine-1", "engine-2", "engine-3")
    controllers = {name: (await running(name))[0] for name in names}
    state = await read_until(store, lambda state: state.current is not None)
    placement = state.current
    assert placement.author == f"controller {state.leader}"
    assert placement.load == ((20, 20, 1400, 20),) * 2
    assert placement.balance_after - placement.balance_before > 0.05
    assert problem_with(placement, shape, "sha256:abc") is None
    # The same load gains nothing more.
    leader = controllers[state.leader]
    assert await leader.improve_map(leader.election.leadership) is None
    assert (await store.read()).current == placement


async def test_when_the_leader_ends_another_goes_on(store, running, make_loads, read_until):
    _, end = await running("engine-1")
    first = await read_until(store, lambda state: state.leader == "engine-1")
    await running("engine-2")
    await end()
    await _says(store, make_loads("a", SKEWED))
    state = await read_until(store, lambda state: state.current is not None)
    assert first.leader == "engine-1"
    assert state.current.author == "controller engine-2"


async def test_a_plan_of_a_deposed_leader_writes_nothing(store, shape, make_loads):
    await _says(store, make_loads("a", SKEWED))
    revision = await store.etcd.put(store.keys.leader, b"other")
    controller = controller_on(store, shape)
    assert await controller.improve_map(Leadership(store.keys.leader, revision - 1)) is None
    assert (await store.read()).mod_revision == 0
    assert await controller.improve_map(Leadership(store.keys.leader, revision))


async def test_no_map_without_load_or_while_engines_are_late(store, shape, make_loads, make_map):
    revision = await store.etcd.put(store.keys.leader, b"me")
    term = Leadership(store.keys.leader, revision)
    controller = controller_on(store, shape)
    assert await controller.improve_map(term) is None
    await _says(store, make_loads("a", SKEWED))
    await _says(store, make_loads("odd", num_ranks=3))
    await store.write(make_map(), await store.read())
    await _says(store, Applied(engine_id="a", version=0))
    assert await controller.improve_map(term) is None
    await _says(store, Applied(engine_id="a", version=1))
    assert (await controller.improve_map(term)).version == 2


async def test_etcd_away_does_not_end_the_controller(start_etcd, running, make_loads, read_until):
    server = start_etcd()
    etcd = Etcd([server.address], timeout_s=0.5)
    store = PlacementStore(etcd, "moe")
    await running("engine-1", on=store)
    await read_until(store, lambda state: state.leader)
    server.kill()
    await asyncio.to_thread(server.launch)
    async with asyncio.timeout(30):
        while True:
            try:
                await _says(store, make_loads("a", SKEWED))
                break
            except EtcdError:
                continue
    await read_until(store, lambda state: state.current is not None)
    await etcd.close()
