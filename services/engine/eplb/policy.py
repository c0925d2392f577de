"""Placement policies: compute a placement from loads, without I/O, clock or randomness.

Both policies are those of deepseek-ai/EPLB. `hierarchical` keeps the experts of a group on one node
(for prefill and small expert-parallel groups); `global` ignores groups (for decode and large ones).
With `spread` (the default) no GPU holds two copies of an expert if that can be avoided.
"""

from dataclasses import dataclass

import numpy as np

from services.engine.eplb.packing import (
    Floats,
    Ints,
    balanced_packing,
    inverse,
    replicate_experts,
)
from services.engine.eplb.spread import separate_copies


class PlacementShapeError(ValueError):
    """Slots, GPUs, nodes or groups do not divide one another; the message names the numbers."""


@dataclass(frozen=True)
class Placement:
    """One map per layer between logical experts and physical slots.

    Attributes:
        phy2log: [layers, slots] the logical expert in each slot; a GPU owns consecutive slots.
        log2phy: [layers, experts, most copies] slots of each expert by copy, padded with -1.
        count: [layers, experts] copies of each expert, at least 1.
    """

    phy2log: Ints
    log2phy: Ints
    count: Ints


def rebalance_experts_global(
    weight: Floats | Ints, num_replicas: int, num_gpus: int, *, spread: bool = True
) -> Placement:
    """Replicate over all experts of a layer, then pack onto all GPUs.

    Arguments and errors as for `rebalance_experts_hierarchical`.
    """
    return rebalance_experts_hierarchical(weight, num_replicas, 1, 1, num_gpus, spread=spread)


def rebalance_experts_hierarchical(
    weight: Floats | Ints,
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_gpus: int,
    *,
    spread: bool = True,
) -> Placement:
    """Pack groups onto nodes, replicate within each node, pack the copies onto its GPUs.

    Args:
        weight: [layers, experts] tokens that each logical expert received.
        num_replicas: slots per layer, all GPUs together.
        num_groups: expert groups of the model's router; 1 if it has none.
        num_nodes: machines; links within a machine are faster than between machines.
        num_gpus: GPUs of all nodes together.
        spread: keep copies of one expert on different GPUs.

    Raises:
        PlacementShapeError: the numbers do not divide one another.
    """
    loads = np.asarray(weight, dtype=np.float64)
    layers, experts = loads.shape
    _check_shape(experts, num_replicas, num_groups, num_nodes, num_gpus)
    # Step 1: whole groups to nodes; "mlog" numbers experts node by node.
    mlog2log = _experts_by_node(loads, num_groups, num_nodes)
    # Step 2: copies within each node. Rows are (layer, node) from here on.
    per_node = np.take_along_axis(loads, mlog2log, 1).reshape(layers * num_nodes, -1)
    copies = replicate_experts(per_node, num_replicas // num_nodes)
    # Step 3: copies to the node's GPUs.
    load_of_copy = np.take_along_axis(per_node / copies.count, copies.expert, 1)
    gpus = num_gpus // num_nodes
    packed = balanced_packing(load_of_copy, gpus, copies.expert if spread else None)
    slot = packed.pack * (copies.expert.shape[1] // gpus) + packed.rank
    order = inverse(slot)
    expert = np.take_along_axis(copies.expert, order, 1)
    rank = np.take_along_axis(copies.rank, order, 1)
    if spread:
        expert, rank = separate_copies(expert, rank, per_node / copies.count, gpus)
    offset = np.tile(np.arange(num_nodes) * (experts // num_nodes), layers)[:, None]
    mlog = (expert + offset).reshape(layers, num_replicas)
    return _placement(np.take_along_axis(mlog2log, mlog, 1), rank.reshape(layers, -1), experts)


def balancedness(placement: Placement, weight: Floats | Ints, num_gpus: int) -> Floats:
    """Balance per layer, [layers]: mean load of a GPU by the largest; 1 is perfect."""
    loads = np.asarray(weight, dtype=np.float64) / placement.count
    per_gpu = np.take_along_axis(loads, placement.phy2log, 1).reshape(len(loads), num_gpus, -1)
    totals = per_gpu.sum(axis=2)
    peak = totals.max(axis=1)
    return np.where(peak > 0, totals.mean(axis=1) / np.maximum(peak, 1e-30), 1.0)


def initial_placement(layers: int, experts: int, num_replicas: int) -> Placement:
    """The placement before any load is known: slot i holds expert i modulo `experts`."""
    slots = np.arange(num_replicas)
    rows = np.tile(slots % experts, (layers, 1))
    return _placement(rows, np.tile(slots // experts, (layers, 1)), experts)


def from_phy2log(phy2log: Ints, experts: int) -> Placement:
    """Complete a placement from its slot table; copies are numbered by slot.

    Raises:
        PlacementShapeError: an expert id is out of range, or an expert has no slot.
    """
    if phy2log.ndim != 2 or phy2log.size == 0:
        raise PlacementShapeError("phy2log must be a table of layers by slots")
    if phy2log.min() < 0 or phy2log.max() >= experts:
        raise PlacementShapeError(f"phy2log names experts outside 0..{experts - 1}")
    one_hot = phy2log[:, :, None] == np.arange(experts)
    if not one_hot.any(axis=1).all():
        layer, expert = np.argwhere(~one_hot.any(axis=1))[0]
        raise PlacementShapeError(f"layer {layer}: expert {expert} has no replica")
    arrival = np.take_along_axis(one_hot.cumsum(axis=1), phy2log[:, :, None], 2)[:, :, 0] - 1
    return _placement(phy2log.astype(np.int64), arrival, experts)


def _experts_by_node(loads: Floats, num_groups: int, num_nodes: int) -> Ints:
    """[layers, experts] the logical expert at each position, where positions go node by node."""
    layers, experts = loads.shape
    size = experts // num_groups
    groups = loads.reshape(layers, num_groups, size).sum(axis=2)
    packed = balanced_packing(groups, num_nodes)
    place = (packed.pack * (num_groups // num_nodes) + packed.rank) * size
    log2mlog = (place[:, :, None] + np.arange(size)).reshape(layers, experts)
    return inverse(log2mlog)


def _placement(phy2log: Ints, rank: Ints, experts: int) -> Placement:
    layers = len(phy2log)
    count = (phy2log[:, :, None] == np.arange(experts)).sum(axis=1)
    log2phy = np.full((layers, experts, int(count.max())), -1, np.int64)
    rows = np.arange(layers)[:, None]
    log2phy[rows, phy2log, rank] = np.arange(phy2log.shape[1])
    return Placement(phy2log, log2phy, count)


def _check_shape(experts: int, replicas: int, groups: int, nodes: int, gpus: int) -> None:
    rules = (
        (replicas >= experts, f"{replicas} replicas cannot hold {experts} experts"),
        (replicas % gpus == 0, f"{replicas} replicas do not divide among {gpus} GPUs"),
        (gpus % nodes == 0, f"{gpus} GPUs do not divide among {nodes} nodes"),
        (groups % nodes == 0, f"{groups} groups do not divide among {nodes} nodes"),
        (experts % groups == 0, f"{experts} experts do not divide into {groups} groups"),
    )
    for holds, problem in rules:
        if not holds:
            raise PlacementShapeError(problem)
