"""Maps the experts that a router chose to the slots that compute them.

The rows of an expert are cut into tiles of TILE_ROWS in the order of rows, and replicas take whole
tiles in turn. The last bits of a product depend on the rows computed together. Since tiles do not
depend on the placement, no placement changes a result.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

TILE_ROWS = 64
"""Rows of an expert that are computed together."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Chosen rows in the order in which they are sent: by slot, then by row."""

    order: Tensor
    """[N] int64: indices into the flattened [T * k] choices, except those without an expert."""
    per_slot: Tensor
    """[slots] int64: rows for each slot."""


class SlotMap:
    """The map of one layer."""

    def __init__(self, phy2log: tuple[int, ...], num_experts: int, device: torch.device) -> None:
        """
        Args:
            phy2log: [slots] the logical expert in each slot; every expert has at least one slot.
        """
        slots: list[list[int]] = [[] for _ in range(num_experts)]
        for slot, expert in enumerate(phy2log):
            slots[expert].append(slot)
        width = max(map(len, slots))
        padded = [own + own[:1] * (width - len(own)) for own in slots]
        self._num_slots = len(phy2log)
        self._slots = torch.tensor(padded, device=device)
        self._copies = torch.tensor([len(own) for own in slots], device=device)

    def dispatch(self, ids: Tensor, first_replica: int) -> Dispatch:
        """Assign a slot to every choice of an expert.

        Args:
            ids: [T, k] int64 logical experts; -1 for none.
            first_replica: replica of the first tile, modulo the number of replicas. The caller
                varies it, so that small rounds use all replicas over time.
        """
        flat = ids.flatten()
        by_expert = flat.argsort(stable=True)
        by_expert = by_expert[int((flat < 0).sum()) :]
        expert = flat.index_select(0, by_expert)
        rows = torch.bincount(expert, minlength=len(self._copies))
        first = rows.cumsum(0).sub_(rows)
        place = torch.arange(len(expert), device=ids.device) - first.index_select(0, expert)
        copy = (place // TILE_ROWS + first_replica) % self._copies.index_select(0, expert)
        slot = self._slots[expert, copy]
        by_slot = slot.argsort(stable=True)
        per_slot = torch.bincount(slot, minlength=self._num_slots)
        return Dispatch(by_expert.index_select(0, by_slot), per_slot)
