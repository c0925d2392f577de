"""The dense feed-forward network of one layer: SwiGLU (Shazeer 2020)."""

import torch
from torch import Tensor

from kernels.interface import Kernels
from services.engine.compute.models.weights import WeightReader, add_bias
from services.engine.contract.model_config import ModelConfig


class Mlp:
    """down(silu(gate(x)) * up(x)); gate and up are one product."""

    def __init__(
        self, config: ModelConfig, kernels: Kernels, reader: WeightReader, at: str
    ) -> None:
        """Pack the weights of the layer whose tensors begin with `at`.

        Raises:
            ModelFileError: a tensor is missing or of the wrong shape.
        """
        hidden, size = config.hidden_size, config.intermediate_size
        gate = reader(f"{at}.mlp.gate_proj.weight", size, hidden)
        up = reader(f"{at}.mlp.up_proj.weight", size, hidden)
        self._kernels = kernels
        self._gate_up = kernels.pack(torch.cat((gate, up)))
        down = reader(f"{at}.mlp.down_proj.weight", hidden, size)
        self._down = kernels.row_parallel(kernels.pack(down))
        self._gate_up_bias: Tensor | None = None
        if config.mlp_bias:
            names = (f"{at}.mlp.gate_proj.bias", f"{at}.mlp.up_proj.bias")
            self._gate_up_bias = torch.cat([reader(name, size) for name in names])
        self._down_bias = reader.optional(
            f"{at}.mlp.down_proj.bias", hidden, wanted=config.mlp_bias
        )

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights, in bytes."""
        biases = (b for b in (self._gate_up_bias, self._down_bias) if b is not None)
        return self._gate_up.nbytes + self._down.nbytes + sum(bias.nbytes for bias in biases)

    def add_to(self, x: Tensor, normed: Tensor) -> None:
        """x [T, hidden] += output for the normed rows [T, hidden]."""
        gate_up = add_bias(self._gate_up(normed), self._gate_up_bias)
        self._down.add_to(x, self._kernels.silu_mul(gate_up))
        add_bias(x, self._down_bias)
