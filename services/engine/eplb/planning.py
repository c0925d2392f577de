"""Plans a placement map from counted loads and decides whether to write it; no clock, no I/O."""

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
"""Least average of a layer's counts; with fewer tokens the counts are mostly chance."""


@dataclass(frozen=True)
class PlanSettings:
    """Settings of the planner.

    Attributes:
        policy: hierarchical keeps the experts of a group on one node, global ignores groups.
        groups: expert groups of the model's router, for hierarchical.
        nodes: machines of the engine's ranks, for hierarchical.
        min_gain: least rise of the balance for which a new map is written.
    """

    policy: str = "global"
    groups: int = 1
    nodes: int = 1
    min_gain: float = 0.05


@dataclass(frozen=True)
class Plan:
    """The current map and the planned one under the same load.

    Attributes:
        load: [layers, experts] tokens.
        before, after: [layers] balance: mean load of a rank by the largest.
        old, new: [layers, slots] logical expert in each slot.
    """

    load: Ints
    before: Floats
    after: Floats
    old: Ints
    new: Ints
    settings: PlanSettings

    @property
    def gain(self) -> float:
        """Rise of the balance, averaged over the layers."""
        return float(self.after.mean() - self.before.mean())

    @property
    def moved(self) -> Ints:
        """[layers] number of slots that hold another expert under the new map."""
        return np.asarray((self.old != self.new).sum(axis=1), np.int64)


def sum_loads(records: Iterable[EngineLoads], shape: ExpertShape, model_revision: str) -> Ints:
    """Sum the loads of all engines of this shape: [layers, experts] tokens."""
    total = np.zeros((shape.num_layers, shape.num_experts), np.int64)
    for record in records:
        if record.shape == shape and record.model_revision == model_revision:
            total += np.array(record.load, np.int64)
    return total


def slots_in_use(current: PlacementMap | None, shape: ExpertShape, model_revision: str) -> Ints:
    """[layers, slots] of the current map, or of the map that engines start with."""
    if current is not None and problem_with(current, shape, model_revision) is None:
        return np.array(current.phy2log, np.int64)
    return initial_placement(shape.num_layers, shape.num_experts, shape.num_slots).phy2log


def make_plan(load: Ints, old: Ints, shape: ExpertShape, settings: PlanSettings) -> Plan:
    """Plan with the policy; layers that it would not balance better keep their old row.

    Raises:
        PlacementShapeError: slots, ranks, nodes or groups do not divide one another.
    """
    slots, ranks = shape.num_slots, shape.num_ranks
    if settings.policy == "hierarchical":
        groups, nodes = settings.groups, settings.nodes
        proposed = rebalance_experts_hierarchical(load, slots, groups, nodes, ranks)
    else:
        proposed = rebalance_experts_global(load, slots, ranks)
    new = keep_slots(old, proposed.phy2log, ranks)
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


def keep_slots(old: Ints, new: Ints, num_ranks: int) -> Ints:
    """Reorder `new` within each rank so that an expert that stays on a rank keeps its slot."""
    result = new.copy()
    size = old.shape[1] // num_ranks
    for layer in range(len(old)):
        for start in range(0, old.shape[1], size):
            rank = slice(start, start + size)
            result[layer, rank] = _reorder(old[layer, rank].tolist(), new[layer, rank].tolist())
    return result


def draft_map(
    plan: Plan, shape: ExpertShape, *, model: str, model_revision: str, **origin: Any
) -> PlacementMap:
    """Make the map of a plan; `origin` holds window_rounds, author and created_unix_ms."""
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


def reason_to_keep(plan: Plan, state: GroupState) -> str | None:
    """Why the current map should be kept for now; None if the plan should be written."""
    version = 0 if state.current is None else state.current.version
    for engine_id, applied in sorted(state.applied.items()):
        if not applied.settled(version):
            return f"{engine_id} still changes from version {applied.version} to {version}"
    least = MIN_TOKENS_PER_EXPERT * plan.load.shape[1]
    if plan.load.sum(axis=1).min() < least:
        return f"fewer than {least} tokens per layer were counted"
    if plan.gain < plan.settings.min_gain:
        return f"the gain of {plan.gain:.3f} is below {plan.settings.min_gain:g}"
    return None


def as_table(rows: Ints) -> Table:
    """The rows as tuples of int."""
    return tuple(tuple(row) for row in rows.tolist())


def _reorder(old: list[int], new: list[int]) -> list[int]:
    arriving = list(new)
    slots: list[int | None] = []
    for expert in old:
        stays = expert in arriving
        if stays:
            arriving.remove(expert)
        slots.append(expert if stays else None)
    return [arriving.pop(0) if expert is None else expert for expert in slots]
