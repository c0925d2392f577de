"""The interface of what a kernel set offers for the experts of a layer: all of them in one call.

A set without it runs experts one after another (`services.engine.compute.expert_parallel.bank`).
Letters in shapes are those of `kernels.interface`: T rows, k experts chosen per row, E experts,
N hidden size, F intermediate size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kernels.interface import Gate


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSizes:
    """What the experts of a layer have in common.

    Raises:
        ValueError: a size is not positive.
    """

    experts: int
    hidden: int
    """N: columns of the rows that experts read and write."""
    intermediate: int
    """F: rows of a gate."""
    gate: "Gate"
    biases: bool
    """Whether the products add biases."""
    dtype: torch.dtype
    device: torch.device

    def __post_init__(self) -> None:
        for name in ("experts", "hidden", "intermediate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 1")


class LayerExperts(Protocol):
    """The packed weights of a layer's experts, and the network that they make."""

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights, in bytes."""

    def store(
        self,
        expert: int,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> None:
        """Pack the weights of one expert; every expert is stored before the first call.

        Args:
            gate_up: [2 F, N]: gate over up.
            down: [N, F].
            gate_up_bias: [2 F]; where the sizes say that there are biases.
            down_bias: [N].

        Raises:
            ValueError: a shape is wrong, or a bias is missing or left over.
        """

    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, counts: Tensor | None = None
    ) -> Tensor:
        """Weighted sum of the chosen experts' outputs; the host waits for nothing.

        Args:
            x: [T, N].
            ids: [T, k] int64; -1 for none.
            weights: [T, k] float32.
            counts: [E] int64: the rows of each expert are added to it.

        Returns:
            [T, N] in the format of x, summed in float32 in the order of the columns of `ids`.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertKernels:
    """The operations on the experts of a layer."""

    allocate: Callable[[ExpertSizes], LayerExperts]
    """Room for the weights of a layer's experts in the layout that the set's products read."""
    assign_slots: Callable[[Tensor, Tensor, Tensor, int, int], Tensor]
    """(ids [T, k] int64, slots [E, copies] int64, copies [E] int64, first, tile) -> [T, k] int64:
    the physical slot of each chosen logical expert; -1 for none.

    The rows of an expert, in their order, are cut into tiles of `tile` rows. Its slots take whole
    tiles in turn, beginning with number `first`. Columns of `slots` beyond an expert's `copies` are
    not read."""
