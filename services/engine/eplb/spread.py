"""Repairs a packing whose copies of one expert are not spread evenly over the GPUs.

The greedy packing spreads them while GPUs have room; at its end the last GPUs with room may all
hold the expert already. A swap with a slot of another GPU then evens the copies out. An expert with
at most as many copies as there are GPUs is never twice on one of them.
"""

import numpy as np

from services.engine.eplb.packing import Floats, Ints


def separate_copies(
    expert: Ints, rank: Ints, load_per_copy: Floats, num_gpus: int
) -> tuple[Ints, Ints]:
    """Swap slots until the copies of each expert per GPU differ by at most one.

    Args:
        expert: [rows, slots] expert of each slot; each GPU has consecutive slots.
        rank: [rows, slots] copy number of each slot.
        load_per_copy: [rows, experts].
        num_gpus: GPUs that share the slots of a row evenly.

    Returns:
        `expert` and `rank` after the swaps; rows that are even already are unchanged.
    """
    expert, rank = expert.copy(), rank.copy()
    experts = load_per_copy.shape[1]
    for row in range(len(expert)):
        held = _held(expert[row], experts, num_gpus)
        # Each swap lowers the sum of the squares of `held`, so this ends; at its end all is even.
        while (uneven := np.ptp(held, axis=0) > 1).any():
            for slot in np.flatnonzero(uneven[expert[row]]):
                other = _best_swap(expert[row], int(slot), held, load_per_copy[row])
                if other is not None:
                    pair = np.array([slot, other])
                    for table in (expert, rank):
                        table[row, pair] = table[row, pair[::-1]]
                    held = _held(expert[row], experts, num_gpus)
    return expert, rank


def _held(row: Ints, experts: int, num_gpus: int) -> Ints:
    """[gpus, experts] the copies of each expert on each GPU."""
    gpu = np.arange(len(row)) // (len(row) // num_gpus)
    counts: Ints = np.bincount(gpu * experts + row, minlength=num_gpus * experts)
    return counts.reshape(num_gpus, experts)


def _best_swap(row: Ints, slot: int, held: Ints, load_per_copy: Floats) -> int | None:
    """The slot to swap with: the one that gives the lowest maximum load of the two GPUs.

    The other GPU has at least two copies fewer of this slot's expert, and more copies of the
    expert that it gives away. None if there is no such slot, or if this slot's copy is the first
    of several that an earlier slot of the GPU can stay for.
    """
    by_gpu = row.reshape(len(held), -1)
    here = slot // by_gpu.shape[1]
    if row[slot] not in by_gpu[here, : slot % by_gpu.shape[1]]:
        return None
    has_fewer = held[:, row[slot]] <= held[here, row[slot]] - 2
    gpus = np.arange(len(held))[:, None]
    allowed = (held[here, by_gpu] < held[gpus, by_gpu]) & has_fewer[:, None]
    if not allowed.any():
        return None
    load = load_per_copy[by_gpu].sum(axis=1)
    gain = load_per_copy[by_gpu] - load_per_copy[row[slot]]
    peak = np.where(allowed, np.maximum(load[here] + gain, load[:, None] - gain), np.inf)
    return int(peak.argmin())
