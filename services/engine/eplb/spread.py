"""Repairs a packing that put two copies of one expert on the same GPU.

The greedy packing avoids this while another GPU has room; at its end the last GPUs with room may
all hold the expert. A swap with a slot of another GPU then separates the copies.
"""

import numpy as np

from services.engine.eplb.packing import Floats, Ints


def separate_copies(
    expert: Ints, rank: Ints, load_per_copy: Floats, num_gpus: int
) -> tuple[Ints, Ints]:
    """Swap slots until no GPU holds an expert twice or no swap helps.

    Args:
        expert: [rows, slots] expert of each slot; each GPU has consecutive slots.
        rank: [rows, slots] copy number of each slot.
        load_per_copy: [rows, experts].
        num_gpus: GPUs that share the slots of a row evenly.

    Returns:
        `expert` and `rank` after the swaps; rows without duplicates are unchanged.
    """
    expert, rank = expert.copy(), rank.copy()
    for row in _rows_with_duplicates(expert, num_gpus):
        for slot in _duplicate_slots(expert[row], num_gpus):
            other = _best_swap(expert[row], slot, load_per_copy[row], num_gpus)
            if other is not None:
                for table in (expert, rank):
                    table[row, [slot, other]] = table[row, [other, slot]]
    return expert, rank


def _rows_with_duplicates(expert: Ints, num_gpus: int) -> list[int]:
    by_gpu = np.sort(expert.reshape(len(expert), num_gpus, -1), axis=2)
    return [int(r) for r in np.flatnonzero((np.diff(by_gpu, axis=2) == 0).any(axis=(1, 2)))]


def _duplicate_slots(row: Ints, num_gpus: int) -> list[int]:
    size = len(row) // num_gpus
    return [s for s in range(len(row)) if row[s] in row[s - s % size : s]]


def _best_swap(row: Ints, slot: int, load_per_copy: Floats, num_gpus: int) -> int | None:
    """The slot to swap with: the one that gives the lowest maximum load of the two GPUs."""
    size = len(row) // num_gpus
    by_gpu = row.reshape(num_gpus, size)
    load = load_per_copy[by_gpu].sum(axis=1)
    here = slot // size
    if row[slot] not in np.delete(by_gpu[here], slot % size):
        return None  # an earlier swap has already separated this pair
    lacks_expert = ~(by_gpu == row[slot]).any(axis=1)
    allowed = ~np.isin(by_gpu, by_gpu[here]) & lacks_expert[:, None]
    if not allowed.any():
        return None
    gain = load_per_copy[by_gpu] - load_per_copy[row[slot]]
    peak = np.where(allowed, np.maximum(load[here] + gain, load[:, None] - gain), np.inf)
    return int(peak.argmin())
