"""The experts of a layer by their definition: one row and one expert at a time, in float64."""

import torch
from torch import Tensor

from kernels.expert_products import ExpertKernels, ExpertSizes
from kernels.reference.layers import gate_mul

Stored = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


class PlainExperts:
    """See kernels.expert_products.LayerExperts."""

    def __init__(self, sizes: ExpertSizes) -> None:
        self._sizes = sizes
        self._stored: dict[int, Stored] = {}

    @property
    def nbytes(self) -> int:
        parts = (part for stored in self._stored.values() for part in stored)
        return sum(part.nbytes for part in parts if part is not None)

    def store(
        self,
        expert: int,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> None:
        self._stored[expert] = (gate_up, down, gate_up_bias, down_bias)

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, counts: Tensor | None = None
    ) -> Tensor:
        total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
        for row, experts in enumerate(ids.tolist()):
            for column, expert in enumerate(experts):
                if expert >= 0:
                    total[row] += weights[row, column] * self._run(expert, x[row : row + 1])[0]
                    if counts is not None:
                        counts[expert] += 1
        return total.to(x.dtype)

    def _run(self, expert: int, row: Tensor) -> Tensor:
        gate_up, down, gate_up_bias, down_bias = self._stored[expert]
        both = row.double() @ gate_up.double().T
        both = both if gate_up_bias is None else both + gate_up_bias.double()
        out = gate_mul(both, self._sizes.gate) @ down.double().T
        return out if down_bias is None else out + down_bias.double()


def assign_slots(ids: Tensor, slots: Tensor, copies: Tensor, first: int, tile: int) -> Tensor:
    """See kernels.expert_products.ExpertKernels.assign_slots."""
    seen = [0] * len(copies)
    assigned = []
    for expert in ids.flatten().tolist():
        if expert < 0:
            assigned.append(-1)
            continue
        copy = (seen[expert] // tile + first) % int(copies[expert])
        assigned.append(int(slots[expert, copy]))
        seen[expert] += 1
    return torch.tensor(assigned, dtype=torch.long).view(ids.shape)


EXPERTS = ExpertKernels(allocate=PlainExperts, assign_slots=assign_slots)
