"""The feed-forward of a layer with experts: who runs a row is decided here, not where.

The router knows logical experts alone; slots, replicas and ranks are the business of
`expert_parallel/`.
"""

from typing import Protocol

from torch import Tensor

from kernels.interface import Kernels
from services.engine.contract.model_config import MoeConfig


class RunExperts(Protocol):
    """Runs rows through the experts that were chosen for them, wherever those are."""

    def __call__(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Weighted sum of the chosen experts' outputs.

        Args:
            layer: counts layers with experts only.
            x: [T, hidden] normed rows.
            ids: [T, k] int64 logical experts; -1 for none.
            weights: [T, k] float32.

        Returns:
            [T, hidden]: added up in float32 in the order of the columns.
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
        self._config = config
        self._route = kernels.route
        self._router = kernels.pack(router)
        self._layer = layer
        self._experts = experts

    @property
    def nbytes(self) -> int:
        """Memory of the router: experts are counted where they are held."""
        return self._router.nbytes

    def add_to(self, x: Tensor, normed: Tensor) -> None:
        """x [T, hidden] += the experts' output for its normed rows."""
        config = self._config
        weights, ids = self._route(self._router(normed), config.top_k, config.norm_topk_prob)
        x.add_(self._experts(self._layer, normed, ids, weights))
