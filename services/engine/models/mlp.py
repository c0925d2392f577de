"""The dense feed-forward of one layer: SwiGLU (Shazeer 2020)."""

import torch
from torch import Tensor

from kernels.dispatch import Kernels
from services.engine.models.config import ModelConfig
from services.engine.models.weights import Taker


class Mlp:
    """down(silu(gate x) * up x), with gate and up as one product."""

    def __init__(self, config: ModelConfig, kernels: Kernels, take: Taker, at: str) -> None:
        """Pack the weights of the layer whose tensors begin with `at`.

        Raises:
            ModelFileError: a tensor is missing or of the wrong shape.
        """
        hidden, middle = config.hidden_size, config.intermediate_size
        gate = take(f"{at}.mlp.gate_proj.weight", middle, hidden)
        up = take(f"{at}.mlp.up_proj.weight", middle, hidden)
        self._kernels = kernels
        self._gate_up = kernels.pack(torch.cat((gate, up)))
        self._down = kernels.pack(take(f"{at}.mlp.down_proj.weight", hidden, middle))

    @property
    def nbytes(self) -> int:
        """Memory of the weights as packed."""
        return self._gate_up.nbytes + self._down.nbytes

    def add_to(self, x: Tensor, normed: Tensor) -> None:
        """x [T, hidden] += the layer's output for its normed rows."""
        self._down.add_to(x, self._kernels.silu_mul(self._gate_up(normed)))
