"""The experts that one rank holds, and their exchange between rounds when the placement changes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.interface import Kernels, Linear
from services.engine.compute.expert_parallel.slot_map import TILE_ROWS
from services.engine.compute.models.architecture import SWIGLU
from services.engine.compute.models.expert_weights import ExpertWeights
from services.engine.compute.models.weights import add_bias
from services.engine.contract.expert_placement import missing_experts, rank_experts
from services.engine.contract.runner import ExpertPlacement, ExpertShape


@dataclass(frozen=True, slots=True)
class _Expert:
    gate_up: Linear
    down: Linear
    gate_up_bias: Tensor | None
    down_bias: Tensor | None

    @property
    def nbytes(self) -> int:
        biases = (self.gate_up_bias, self.down_bias)
        rows = sum(bias.nbytes for bias in biases if bias is not None)
        return self.gate_up.nbytes + self.down.nbytes + rows


class ExpertBank:
    """One rank's experts of all layers. Local slots with the same expert share its weights."""

    def __init__(
        self,
        weights: ExpertWeights,
        kernels: Kernels,
        shape: ExpertShape,
        rank: int,
        placement: ExpertPlacement,
    ) -> None:
        """Read and pack the experts that the placement assigns to this rank.

        Args:
            weights: of all experts.
        """
        self.weights = weights
        self.kernels = kernels
        self._shape = shape
        self._rank = rank
        self.placement = placement
        self._slots = rank_experts(placement, shape, rank)
        held = {(layer, expert) for layer, row in enumerate(self._slots) for expert in row}
        weights.skip_others(held)
        self._experts = {key: self._pack(*key) for key in sorted(held)}
        self._next: ExpertPlacement | None = None
        self._missing: list[tuple[int, int]] = []
        self._prepared: dict[tuple[int, int], _Expert] = {}

    @property
    def nbytes(self) -> int:
        """Memory of the experts in use, in bytes."""
        return sum(expert.nbytes for expert in self._experts.values())

    def compute(self, layer: int, rows: Tensor, counts: Sequence[Sequence[int]]) -> Tensor:
        """Run rows through the experts in this rank's slots, tile by tile.

        Args:
            rows: [N, hidden], ordered by the rank they came from, then by slot.
            counts: [ranks][local slots]: rows of each.

        Returns:
            [N, hidden] in the same order.
        """
        out = torch.empty_like(rows)
        at = 0
        for from_rank in counts:
            for expert_id, count in zip(self._slots[layer], from_rank, strict=True):
                if count:
                    expert = self._experts[layer, expert_id]
                    self._run(expert, rows[at : at + count], out[at : at + count])
                    at += count
        return out

    def start_placement(self, placement: ExpertPlacement) -> None:
        """Make this the next placement; experts prepared for another one are dropped."""
        self._next = placement
        self._prepared = {}
        self._missing = list(missing_experts(self.placement, placement, self._shape, self._rank))

    def prepare(self) -> None:
        """Read and pack one missing expert of the next placement, if there is one."""
        if self._missing:
            key = self._missing.pop(0)
            self._prepared[key] = self._pack(*key)

    def apply(self) -> None:
        """Use the next placement from the next round on."""
        assert self._next is not None, "apply without start_placement"
        assert not self._missing, "apply before all experts are prepared"
        self.placement, self._next = self._next, None
        self._slots = rank_experts(self.placement, self._shape, self._rank)
        needed = {(layer, expert) for layer, row in enumerate(self._slots) for expert in row}
        loaded = self._experts | self._prepared
        self._experts = {key: loaded[key] for key in needed}
        self._prepared = {}

    def _run(self, expert: _Expert, rows: Tensor, out: Tensor) -> None:
        for at in range(0, len(rows), TILE_ROWS):
            # A copy: the alignment of a tile may decide which code computes the product, and so
            # its last bits.
            tile = rows[at : at + TILE_ROWS].clone()
            opened = self._open(add_bias(expert.gate_up(tile), expert.gate_up_bias))
            out[at : at + TILE_ROWS] = add_bias(expert.down(opened), expert.down_bias)

    def _open(self, gate_up: Tensor) -> Tensor:
        if self.weights.gate == SWIGLU:
            return self.kernels.silu_mul(gate_up)
        return self.kernels.gate_mul(gate_up, self.weights.gate)

    def _pack(self, layer: int, expert: int) -> _Expert:
        read = self.weights.read(layer, expert)
        gate_up, down = self.kernels.pack(read.gate_up), self.kernels.pack(read.down)
        return _Expert(gate_up, down, read.gate_up_bias, read.down_bias)
