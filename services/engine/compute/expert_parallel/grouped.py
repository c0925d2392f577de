"""Experts of a process that holds all of them, on a kernel set that runs a layer's in one call."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.expert_products import ExpertKernels, ExpertSizes, LayerExperts
from services.engine.compute.expert_parallel.lone import LoneExperts
from services.engine.compute.models.expert_weights import ExpertWeights
from services.engine.compute.models.moe import RunExperts
from services.engine.contract.runner import ExpertShape


class GroupedExperts(LoneExperts):
    """`RunExperts` for all layers, and what `ExpertLeader` is for one rank.

    Every expert is in memory once, whichever slots a placement gives it. Rows are counted on the
    device: the host reads counts only where a report needs them.
    """

    def __init__(
        self,
        shape: ExpertShape,
        model_revision: str,
        window: int,
        weights: ExpertWeights,
        kernels: ExpertKernels,
    ) -> None:
        """Read and pack all experts.

        Args:
            window: number of rounds over which rows are counted.

        Raises:
            ModelFileError: a stored value cannot be decoded.
        """
        super().__init__(shape, model_revision, window)
        self._layers = [_load(weights, kernels, layer) for layer in range(shape.num_layers)]
        self.nbytes = sum(layer.nbytes for layer in self._layers)
        sizes = (shape.num_layers, shape.num_experts)
        self._counts = torch.zeros(sizes, dtype=torch.int64, device=weights.device)
        self._window = _Window(window, self._counts)

    @property
    def run_experts(self) -> RunExperts | None:
        """What a layer calls."""
        return self

    def __call__(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """See RunExperts."""
        return self._layers[layer](x, ids, weights, self._counts[layer])

    def loads(self) -> tuple[tuple[int, ...], ...]:
        """See Runner.expert_loads; waits for the rounds before."""
        return tuple(tuple(row) for row in self._window.total.tolist())

    def clear_loads(self) -> None:
        """Discard the counts of all rounds so far."""
        self._window.clear()

    @contextlib.contextmanager
    def round(self) -> Iterator[None]:
        """Count the rows of the round that the body runs."""
        self._counts.zero_()
        yield
        self._window.add_round(self._counts)


class _Window:
    """Sums the counts of the last rounds on their device; see expert_load.ExpertLoads."""

    def __init__(self, rounds: int, like: Tensor) -> None:
        self._ring = torch.zeros(rounds, *like.shape, dtype=torch.int32, device=like.device)
        self.total = torch.zeros_like(like)
        self._next = 0

    def add_round(self, counts: Tensor) -> None:
        """Add a round [layers, experts]; the oldest one leaves the window."""
        oldest = self._ring[self._next]
        self.total.add_(counts).sub_(oldest)
        oldest.copy_(counts)
        self._next = (self._next + 1) % len(self._ring)

    def clear(self) -> None:
        """Discard all counts."""
        self._ring.zero_()
        self.total.zero_()
        self._next = 0


def _load(weights: ExpertWeights, kernels: ExpertKernels, layer: int) -> LayerExperts:
    """The experts of a layer; each is read, packed and dropped before the next one."""
    count = len(weights.names[layer])
    first = weights.read(layer, 0)
    sizes = ExpertSizes(
        experts=count,
        hidden=weights.hidden_size,
        intermediate=first.down.shape[1],
        gate=weights.gate,
        biases=first.down_bias is not None,
        dtype=weights.dtype,
        device=weights.device,
    )
    packed = kernels.allocate(sizes)
    for expert in range(count):
        own = first if expert == 0 else weights.read(layer, expert)
        packed.store(expert, own.gate_up, own.down, own.gate_up_bias, own.down_bias)
    return packed
