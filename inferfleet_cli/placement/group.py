"""Finds the group of engines that a `placement` command refers to, and the shape of its maps."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from inferfleet_cli.errors import NOTHING_THERE, CliError
from services.common.etcd.client import Etcd
from services.engine.contract.runner import ExpertShape
from services.engine.eplb.placement_map import Applied, EngineLoads
from services.engine.eplb.placement_store import GroupState, PlacementStore, list_groups

_POLL_S = 0.1
_COUNT_S = 5.0
"""The first tokens of an engine reach etcd within this time: it publishes its counts every 2 s."""


@dataclass(frozen=True)
class Target:
    """A group of engines, and the model and shape that its maps must fit."""

    store: PlacementStore
    state: GroupState
    model: str
    model_revision: str
    shape: ExpertShape

    @property
    def name(self) -> str:
        return self.store.keys.group


async def find_target(etcd: Etcd, name: str) -> Target:
    """Find the group by its name or its model; an empty name means the only group.

    Raises:
        CliError: no group matches, or several do.
    """
    groups = await list_groups(etcd)
    chosen = _choose_group(groups, name)
    return _target_of(PlacementStore(etcd, chosen), groups[chosen])


async def wait_counted(target: Target) -> Target:
    """Wait until an engine has counted tokens, for a few seconds; returns the target as it is then.

    A plan that is asked for right after a request would otherwise find no counts.
    """
    deadline = asyncio.get_running_loop().time() + _COUNT_S
    while not any(map(_has_counts, target.state.loads.values())):
        if asyncio.get_running_loop().time() >= deadline:
            break
        await asyncio.sleep(_POLL_S)
        target = replace(target, state=await target.store.read())
    return target


async def wait_settled(store: PlacementStore, version: int, wait_s: float) -> Mapping[str, Applied]:
    """Wait until each engine uses or rejects the version, or time is up; returns their records."""
    deadline = asyncio.get_running_loop().time() + wait_s
    while True:
        applied = (await store.read()).applied
        settled = all(one.settled(version) for one in applied.values())
        if settled or asyncio.get_running_loop().time() >= deadline:
            return applied
        await asyncio.sleep(_POLL_S)


def _has_counts(loads: EngineLoads) -> bool:
    return any(map(any, loads.load))


def _choose_group(groups: Mapping[str, GroupState], name: str) -> str:
    if not groups:
        raise CliError(
            "there is no model with experts: no engine that serves one is registered in etcd, and"
            " etcd holds no map",
            NOTHING_THERE,
        )
    matching = [group for group in groups if name in ("", group, _model_of(groups[group]))]
    if len(matching) == 1:
        return matching[0]
    listed = ", ".join(matching or groups)
    if matching:
        raise CliError(f"--group: several groups match; name one of: {listed}")
    raise CliError(f"--group: no group or model {name!r}; there are only: {listed}", NOTHING_THERE)


def _model_of(state: GroupState) -> str:
    for record in state.loads.values():
        return record.model
    return "" if state.newest is None else state.newest.model


def _target_of(store: PlacementStore, state: GroupState) -> Target:
    shapes = Counter(record.shape for record in state.loads.values())
    if shapes:
        shape = shapes.most_common(1)[0][0]
        record = next(record for record in state.loads.values() if record.shape == shape)
        return Target(store, state, record.model, record.model_revision, shape)
    newest = state.newest
    if newest is None:
        raise CliError(
            f"no engine of {store.keys.group} is registered, and etcd holds no map of it",
            NOTHING_THERE,
        )
    shape = ExpertShape(
        num_layers=len(newest.phy2log),
        num_experts=len(newest.copies[0]),
        num_slots=len(newest.phy2log[0]),
        num_ranks=newest.num_ranks,
    )
    return Target(store, state, newest.model, newest.model_revision, shape)
