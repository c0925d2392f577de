"""The two greedy steps of every placement policy: packing and replication.

An independent implementation of the algorithms of deepseek-ai/EPLB, vectorized in numpy over rows
(layers, or pairs of layer and node). Sorts are stable, so equal loads give equal plans.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Packing:
    """The pack of each item.

    Attributes:
        pack: [rows, items] index of the pack.
        rank: [rows, items] position within that pack, 0 .. capacity - 1.
    """

    pack: Ints
    rank: Ints


@dataclass(frozen=True)
class Replication:
    """The expert in each slot.

    Attributes:
        expert: [rows, slots]; the first `experts` slots are the identity.
        rank: [rows, slots] number of the copy, from 0.
        count: [rows, experts] copies of each expert.
    """

    expert: Ints
    rank: Ints
    count: Ints


def balanced_packing(weight: Floats, num_packs: int, kind: Ints | None = None) -> Packing:
    """Put items into packs of equal size, heaviest first, each into the lightest pack with room.

    Args:
        weight: [rows, items], items divisible by num_packs.
        num_packs: number of packs.
        kind: [rows, items]; if given, an item goes to one of the packs with room that hold the
            fewest items of its kind (two copies of an expert on one GPU are useless).
    """
    rows, items = weight.shape
    capacity = items // num_packs
    every_row = np.arange(rows)
    if capacity == 1:
        return Packing(np.tile(np.arange(items), (rows, 1)), np.zeros((rows, items), np.int64))
    order = np.argsort(-weight, axis=1, kind="stable")
    pack = np.empty((rows, items), np.int64)
    rank = np.empty((rows, items), np.int64)
    load = np.zeros((rows, num_packs))
    used = np.zeros((rows, num_packs), np.int64)
    holds = None if kind is None else np.zeros((rows, num_packs, int(kind.max()) + 1), int)
    for item in order.T:
        cost = np.where(used < capacity, load, np.inf)
        if holds is not None and kind is not None:
            held = np.where(used < capacity, holds[every_row, :, kind[every_row, item]], items)
            cost = np.where(held == held.min(axis=1, keepdims=True), cost, np.inf)
        best = cost.argmin(axis=1)
        pack[every_row, item] = best
        rank[every_row, item] = used[every_row, best]
        used[every_row, best] += 1
        load[every_row, best] += weight[every_row, item]
        if holds is not None and kind is not None:
            holds[every_row, best, kind[every_row, item]] += 1
    return Packing(pack, rank)


def replicate_experts(weight: Floats, num_slots: int) -> Replication:
    """Give each extra slot to the expert whose load per copy is the largest (ties: lowest id).

    Without any load the experts take turns, so their copies differ by at most one.

    Args:
        weight: [rows, experts].
        num_slots: at least the number of experts.
    """
    rows, experts = weight.shape
    every_row = np.arange(rows)
    expert = np.tile(np.arange(num_slots), (rows, 1))
    rank = np.zeros((rows, num_slots), np.int64)
    count = np.ones((rows, experts), np.int64)
    # Which weight the experts of a row without load have does not matter, if it is the same.
    weight = np.where(weight.any(axis=1, keepdims=True), weight, 1.0)
    for slot in range(experts, num_slots):
        busiest = (weight / count).argmax(axis=1)
        expert[:, slot] = busiest
        rank[:, slot] = count[every_row, busiest]
        count[every_row, busiest] += 1
    return Replication(expert, rank, count)


def inverse(permutation: Ints) -> Ints:
    """Row by row: `inverse(p)[r, p[r, i]] == i`."""
    result = np.empty_like(permutation)
    np.put_along_axis(
        result, permutation, np.broadcast_to(np.arange(permutation.shape[1]), permutation.shape), 1
    )
    return result
