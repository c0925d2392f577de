"""The experts that one rank holds: packed once, shared by its slots, exchanged between rounds."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.interface import Kernels, Linear
from services.engine.compute.expert_parallel.slot_map import TILE_ROWS
from services.engine.compute.models.expert_weights import ExpertWeights
from services.engine.contract.expert_placement import missing_experts, rank_experts
from services.engine.contract.runner import ExpertPlacement, ExpertShape


@dataclass(frozen=True, slots=True)
class _Expert:
    gate_up: Linear
    down: Linear

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes


class ExpertBank:
    """One rank's experts of all layers. Local slots that hold one expert share its weights."""

    def __init__(
        self,
        weights: ExpertWeights,
        kernels: Kernels,
        shape: ExpertShape,
        rank: int,
        placement: ExpertPlacement,
    ) -> None:
        """Read and pack what the placement puts on this rank."""
        self.weights = weights
        self.kernels = kernels
        self._shape = shape
        self._rank = rank
        self.placement = placement
        self._own = rank_experts(placement, shape, rank)
        self._held = {
            (layer, expert): self._pack(layer, expert)
            for layer, row in enumerate(self._own)
            for expert in set(row)
        }
        self._next: ExpertPlacement | None = None
        self._missing: list[tuple[int, int]] = []
        self._spare: dict[tuple[int, int], _Expert] = {}

    @property
    def nbytes(self) -> int:
        """Memory of the experts in use."""
        return sum(expert.nbytes for expert in self._held.values())

    def compute(self, layer: int, rows: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        """Run rows through this rank's slots, tile by tile.

        Args:
            rows: [N, hidden], ordered by the rank they came from, then by slot.
            counts: [ranks][local slots] rows of each.

        Returns:
            [N, hidden] in the same order.
        """
        out = torch.empty_like(rows)
        at = 0
        for from_rank in counts:
            for expert_id, count in zip(self._own[layer], from_rank, strict=True):
                if count:
                    expert = self._held[layer, expert_id]
                    self._run(expert, rows[at : at + count], out[at : at + count])
                    at += count
        return out

    def begin(self, placement: ExpertPlacement) -> None:
        """Take this as the next placement; what was prepared of another is dropped."""
        self._next = placement
        self._spare = {}
        self._missing = list(missing_experts(self.placement, placement, self._shape, self._rank))

    def prepare(self) -> None:
        """Read and pack one expert of the next placement, if one is missing."""
        if self._missing:
            key = self._missing.pop(0)
            self._spare[key] = self._pack(*key)

    def apply(self) -> None:
        """Use the next placement from now on."""
        assert self._next is not None, "no placement was begun"
        assert not self._missing, "the placement is not prepared"
        self.placement, self._next = self._next, None
        self._own = rank_experts(self.placement, self._shape, self._rank)
        wanted = {(layer, expert) for layer, row in enumerate(self._own) for expert in row}
        known = self._held | self._spare
        self._held = {key: known[key] for key in wanted}
        self._spare = {}

    def _run(self, expert: _Expert, rows: Tensor, out: Tensor) -> None:
        for at in range(0, len(rows), TILE_ROWS):
            # In memory of its own: alignment may choose a product's code, and with it its bits.
            tile = rows[at : at + TILE_ROWS].clone()
            middle = self.kernels.silu_mul(expert.gate_up(tile))
            out[at : at + TILE_ROWS] = expert.down(middle)

    def _pack(self, layer: int, expert: int) -> _Expert:
        gate_up, down = self.weights.read(layer, expert)
        return _Expert(self.kernels.pack(gate_up), self.kernels.pack(down))
