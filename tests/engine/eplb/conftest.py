"""Maps, engines' records and stores of a group that no other test uses."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest

from services.common.etcd.client import Etcd, EtcdError
from services.engine.contract.runner import ExpertShape
from services.engine.eplb.placement_map import EngineLoads, PlacementMap, count_copies
from services.engine.eplb.placement_store import GroupState, PlacementStore

SHAPE = ExpertShape(num_layers=2, num_experts=4, num_slots=6, num_ranks=2)
_groups = itertools.count()


@pytest.fixture
def shape() -> ExpertShape:
    """2 layers, 4 experts in 6 slots on 2 ranks."""
    return SHAPE


@pytest.fixture
def make_map() -> Callable[..., PlacementMap]:
    """A map of `shape` that fits; keyword arguments replace its fields."""

    def make(version: int = 0, row: tuple[int, ...] = (0, 1, 2, 3, 0, 1), **facts: Any):
        phy2log = facts.pop("phy2log", (row,) * SHAPE.num_layers)
        made = {
            "model": "moe",
            "model_revision": "sha256:abc",
            "num_ranks": SHAPE.num_ranks,
            "copies": count_copies(phy2log, SHAPE.num_experts),
            "policy": "manual",
            "author": "test",
            "created_unix_ms": 1000 + version,
        }
        return PlacementMap(version=version, phy2log=phy2log, **(made | facts))

    return make


@pytest.fixture
def make_loads() -> Callable[..., EngineLoads]:
    """What an engine of `shape` counted: the same row of tokens in each layer."""

    def make(engine_id: str = "engine-1", row: tuple[int, ...] = (700, 100, 100, 100), **facts):
        made = {
            "model": "moe",
            "model_revision": "sha256:abc",
            "num_layers": SHAPE.num_layers,
            "num_experts": SHAPE.num_experts,
            "num_slots": SHAPE.num_slots,
            "num_ranks": SHAPE.num_ranks,
            "window_rounds": 100,
            "load": (row,) * SHAPE.num_layers,
        }
        return EngineLoads(engine_id=engine_id, **(made | facts))

    return make


@pytest.fixture
def read_until() -> Callable[..., Any]:
    """Reads a store's group until `holds`; tries again while etcd is unavailable."""

    async def read(store: PlacementStore, holds: Callable[[GroupState], bool] = bool) -> GroupState:
        async with asyncio.timeout(30):
            while True:
                try:
                    if holds(state := await store.read()):
                        return state
                except EtcdError:
                    continue

    return read


@pytest.fixture
async def store(etcd_endpoint):
    """The store of a new group in a real etcd."""
    etcd = Etcd([etcd_endpoint])
    yield PlacementStore(etcd, f"test-{next(_groups)}")
    await etcd.close()
