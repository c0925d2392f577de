"""The feed-forward network of a layer with experts: its router chooses the experts of each row.

The router deals with logical experts. Slots, replicas and ranks are handled by `expert_parallel/`.
"""

from typing import Protocol

from torch import Tensor

from kernels.interface import Kernels, Routing
from services.engine.contract.model_config import MoeConfig


class RunExperts(Protocol):
    """Runs rows through the experts chosen for them, on whichever rank holds those."""

    def __call__(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of the chosen experts' outputs.

        Args:
            layer: index among the layers with experts.
            x: [T, hidden] normed rows.
            ids: [T, k] int64 logical experts; -1 for none.
            weights: [T, k] float32.

        Returns:
            [T, hidden], summed in float32 in the order of the columns of `ids`.
        """


class MoeBlock:
    """Router and experts of one layer."""

    def __init__(
        self,
        config: MoeConfig,
        kernels: Kernels,
        router: Tensor,
        layer: int,
        experts: RunExperts,
    ) -> None:
        self._routing = Routing(config.top_k, renormalise=config.norm_topk_prob)
        self._route = kernels.route
        self._router = kernels.pack(router)
        self._layer = layer
        self._experts = experts

    @property
    def nbytes(self) -> int:
        """Memory of the router in bytes; experts are counted by the rank that holds them."""
        return self._router.nbytes

    def add_to(self, x: Tensor, normed: Tensor) -> None:
        """x [T, hidden] += the experts' output for the normed rows [T, hidden]."""
        weights, ids = self._route(self._router(normed), self._routing, None, None)
        x.add_(self._experts(self._layer, normed, ids, weights))
