"""The experts of a layer: their stacked weights, and the launches of a call in order."""

from functools import partial

import torch
from torch import Tensor

from kernels.expert_products import ExpertKernels, ExpertSizes
from kernels.triton.experts.align import align, assign_slots
from kernels.triton.experts.combine import combine
from kernels.triton.experts.grouped import down_product, gate_up_product
from kernels.triton.experts.tiles import choose_tiles
from kernels.triton.products.codes import CodedWeight, alternate
from kernels.triton.products.operands import Weight


class StackedExperts:
    """See kernels.expert_products.LayerExperts."""

    def __init__(
        self,
        sizes: ExpertSizes,
        gate_up: Weight,
        down: Weight,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        *,
        invariant: bool = False,
    ) -> None:
        """
        Args:
            gate_up: [E, 2 F, N], rows of gate and up alternate; as do those of its bias [E, 2 F].
            down: [E, N, F]; its bias is [E, N].
            invariant: a row's bits do not depend on the number of rows.
        """
        self._sizes = sizes
        self._gate_up, self._down = gate_up, down
        self._gate_up_bias, self._down_bias = gate_up_bias, down_bias
        self._invariant = invariant

    @property
    def nbytes(self) -> int:
        """See LayerExperts."""
        parts = (self._gate_up, self._down, self._gate_up_bias, self._down_bias)
        return sum(part.nbytes for part in parts if part is not None)

    def store(
        self,
        expert: int,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> None:
        """See LayerExperts; only plain weights are stored one by one."""
        stacks: dict[str, tuple[Weight | None, Tensor | None]] = {
            "gate_up": (self._gate_up, gate_up),
            "down": (self._down, down),
            "gate_up_bias": (self._gate_up_bias, gate_up_bias),
            "down_bias": (self._down_bias, down_bias),
        }
        for name, (stack, own) in stacks.items():
            wanted = None if stack is None else tuple(stack.shape[1:])
            found = None if own is None else tuple(own.shape)
            if found != wanted:
                raise ValueError(f"{name} of expert {expert} is {found}, it must be {wanted}")
        for room, rows in ((self._gate_up, _rows_alternate(gate_up)), (self._down, down)):
            if isinstance(room, CodedWeight):
                raise ValueError(f"expert {expert}: weights in {room.format} come as a stack")
            room[expert].copy_(rows)
        if self._gate_up_bias is not None and gate_up_bias is not None:
            self._gate_up_bias[expert].copy_(_rows_alternate(gate_up_bias))
        if self._down_bias is not None and down_bias is not None:
            self._down_bias[expert].copy_(down_bias)

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, counts: Tensor | None = None
    ) -> Tensor:
        """See LayerExperts."""
        sizes, (rows, top_k) = self._sizes, ids.shape
        tiles = choose_tiles(
            sizes.dtype,
            rows * top_k,
            sizes.experts,
            coded=isinstance(self._gate_up, CodedWeight),
            invariant=self._invariant,
        )
        aligned = align(ids, sizes.experts, tiles.rows, counts)
        opened = gate_up_product(
            x.contiguous(), self._gate_up, self._gate_up_bias, sizes.gate, aligned, top_k, tiles
        )
        out = down_product(opened, self._down, self._down_bias, aligned, tiles)
        return combine(out.view(rows, top_k, sizes.hidden), weights, ids)


def allocate(sizes: ExpertSizes, *, invariant: bool = False) -> StackedExperts:
    """See kernels.expert_products.ExpertKernels.allocate."""
    count, hidden, size = sizes.experts, sizes.hidden, sizes.intermediate

    def room(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=sizes.dtype, device=sizes.device)

    return StackedExperts(
        sizes,
        room(count, 2 * size, hidden),
        room(count, hidden, size),
        room(count, 2 * size) if sizes.biases else None,
        room(count, hidden) if sizes.biases else None,
        invariant=invariant,
    )


def coded_experts(
    sizes: ExpertSizes,
    gate_up: CodedWeight,
    down: CodedWeight,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    invariant: bool = False,
) -> StackedExperts:
    """Experts whose weights stay in 8 or 4 bits.

    Args:
        gate_up: [E, 2 F, N]: gate over up, as is its bias [E, 2 F].
        down: [E, N, F]; its bias is [E, N].

    Raises:
        ValueError: a shape does not fit.
    """
    count, hidden, size = sizes.experts, sizes.hidden, sizes.intermediate
    for name, part, wanted in (
        ("gate_up", gate_up, (count, 2 * size, hidden)),
        ("down", down, (count, hidden, size)),
    ):
        if part.shape != wanted:
            raise ValueError(f"{name} is {part.shape}, it must be {wanted}")
    turned = None if gate_up_bias is None else _alternate_biases(gate_up_bias)
    return StackedExperts(sizes, gate_up.alternate(), down, turned, down_bias, invariant=invariant)


def _rows_alternate(rows: Tensor) -> Tensor:
    """Gate over up, [2 F] or [2 F, N], as rows that alternate."""
    return torch.stack(rows.chunk(2), dim=1).flatten(0, 1)


def _alternate_biases(biases: Tensor) -> Tensor:
    return alternate(biases.unsqueeze(-1)).squeeze(-1)


EXPERTS = ExpertKernels(allocate=allocate, assign_slots=assign_slots)
INVARIANT_EXPERTS = ExpertKernels(
    allocate=partial(allocate, invariant=True), assign_slots=assign_slots
)
