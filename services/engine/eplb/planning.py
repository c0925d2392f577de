"""From counted loads to a proposed map and to the decision to write it; pure, no clock, no I/O."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from services.engine.contract.runner import ExpertShape
from services.engine.eplb.packing import Floats, Ints
from services.engine.eplb.placement_map import (
    EngineLoads,
    PlacementMap,
    Table,
    count_copies,
    problem_with,
)
from services.engine.eplb.placement_store import GroupState
from services.engine.eplb.policy import (
    balancedness,
    from_phy2log,
    initial_placement,
    rebalance_experts_global,
    rebalance_experts_hierarchical,
)

MIN_TOKENS_PER_EXPERT = 8
"""On average and per layer; with fewer the counts say more about chance than about the traffic."""


@dataclass(frozen=True)
class PlanSettings:
    """How to plan.

    Attributes:
        policy: hierarchical keeps a group's experts on one node, global ignores groups.
        groups, nodes: of the model's router and of the engine's ranks; for hierarchical.
        min_gain: the balance must rise by this much to be worth moving weights.
    """

    policy: str = "global"
    groups: int = 1
    nodes: int = 1
    min_gain: float = 0.05


@dataclass(frozen=True)
class Plan:
    """Today's map and tomorrow's under the same load.

    Attributes:
        load: [layers, experts] tokens.
        before, after: [layers] mean by largest load of a rank.
        old, new: [layers, slots].
    """

    load: Ints
    before: Floats
    after: Floats
    old: Ints
    new: Ints
    settings: PlanSettings

    @property
    def gain(self) -> float:
        """Of the balance's mean over layers."""
        return float(self.after.mean() - self.before.mean())

    @property
    def moved(self) -> Ints:
        """[layers] slots that would hold another expert."""
        return np.asarray((self.old != self.new).sum(axis=1), np.int64)


def sum_loads(records: Iterable[EngineLoads], shape: ExpertShape, model_revision: str) -> Ints:
    """[layers, experts] tokens of all engines of this shape, over their windows."""
    total = np.zeros((shape.num_layers, shape.num_experts), np.int64)
    for record in records:
        if record.shape == shape and record.model_revision == model_revision:
            total += np.array(record.load, np.int64)
    return total


def slots_in_use(current: PlacementMap | None, shape: ExpertShape, model_revision: str) -> Ints:
    """[layers, slots] of the map that stands, or of the one that engines start with."""
    if current is not None and problem_with(current, shape, model_revision) is None:
        return np.array(current.phy2log, np.int64)
    return initial_placement(shape.num_layers, shape.num_experts, shape.num_slots).phy2log


def make_plan(load: Ints, old: Ints, shape: ExpertShape, settings: PlanSettings) -> Plan:
    """The policy's map for this load in the layers that it balances better, else the old one.

    Raises:
        PlacementShapeError: slots, ranks, nodes or groups that do not divide one another.
    """
    slots, ranks = shape.num_slots, shape.num_ranks
    if settings.policy == "hierarchical":
        groups, nodes = settings.groups, settings.nodes
        proposed = rebalance_experts_hierarchical(load, slots, groups, nodes, ranks)
    else:
        proposed = rebalance_experts_global(load, slots, ranks)
    new = keep_places(old, proposed.phy2log, ranks)
    before = balancedness(from_phy2log(old, shape.num_experts), load, ranks)
    after = balancedness(from_phy2log(new, shape.num_experts), load, ranks)
    better = after > before
    return Plan(
        load=load,
        before=before,
        after=np.where(better, after, before),
        old=old,
        new=np.where(better[:, None], new, old),
        settings=settings,
    )


def keep_places(old: Ints, new: Ints, num_ranks: int) -> Ints:
    """`new` with its experts reordered within each rank, so that those that stay do not move."""
    result = new.copy()
    size = old.shape[1] // num_ranks
    for layer in range(len(old)):
        for start in range(0, old.shape[1], size):
            rank = slice(start, start + size)
            result[layer, rank] = _reorder(old[layer, rank].tolist(), new[layer, rank].tolist())
    return result


def draft(
    plan: Plan, shape: ExpertShape, *, model: str, model_revision: str, **origin: Any
) -> PlacementMap:
    """The plan as a map to be written; `origin` is window_rounds, author, created_unix_ms."""
    phy2log = as_table(plan.new)
    return PlacementMap(
        version=0,
        model=model,
        model_revision=model_revision,
        num_ranks=shape.num_ranks,
        phy2log=phy2log,
        copies=count_copies(phy2log, shape.num_experts),
        policy=plan.settings.policy,
        load=as_table(plan.load),
        balance_before=round(float(plan.before.mean()), 6),
        balance_after=round(float(plan.after.mean()), 6),
        **origin,
    )


def why_not(plan: Plan, state: GroupState) -> str | None:
    """Why a plan should not be written now, or None if it should."""
    version = 0 if state.current is None else state.current.version
    for engine_id, applied in sorted(state.applied.items()):
        if not applied.settled(version):
            return f"{engine_id} still goes over from version {applied.version} to {version}"
    least = MIN_TOKENS_PER_EXPERT * plan.load.shape[1]
    if plan.load.sum(axis=1).min() < least:
        return f"fewer than {least} tokens per layer were counted"
    if plan.gain < plan.settings.min_gain:
        return f"the gain of {plan.gain:.3f} is below {plan.settings.min_gain:g}"
    return None


def as_table(rows: Ints) -> Table:
    """Plain ints."""
    return tuple(tuple(row) for row in rows.tolist())


def _reorder(old: list[int], new: list[int]) -> list[int]:
    arriving = list(new)
    places: list[int | None] = []
    for expert in old:
        stays = expert in arriving
        if stays:
            arriving.remove(expert)
        places.append(expert if stays else None)
    return [arriving.pop(0) if expert is None else expert for expert in places]
