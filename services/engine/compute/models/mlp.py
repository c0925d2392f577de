"""The dense feed-forward network of one layer: gated (Shazeer 2020), as declared."""

import torch
from torch import Tensor

from kernels.interface import Kernels
from services.engine.compute.models.architecture import SWIGLU, Dense
from services.engine.compute.models.weights import WeightReader, add_bias
from services.engine.contract.model_config import ModelConfig


class Mlp:
    """down(f(gate(x)) * up(x)); gate and up are one product."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        reader: WeightReader,
        at: str,
        made_of: Dense,
        *,
        size: int = 0,
        norm_offset: float = 0.0,
    ) -> None:
        """Pack the weights of the layer whose tensors begin with `at`.

        Args:
            size: rows of the gate; 0: as the configuration says.
            norm_offset: see Architecture.

        Raises:
            ModelFileError: a tensor is missing or of the wrong shape.
        """
        hidden, size = config.hidden_size, size or config.intermediate_size
        self._kernels = kernels
        self._gate = made_of.gate
        self._eps = config.rms_norm_eps
        # A joined tensor has the rows of both; two tensors have their own.
        rows = 2 * size // len(made_of.gate_up)
        parts = [reader(f"{at}.{name}.weight", rows, hidden) for name in made_of.gate_up]
        self._gate_up = kernels.pack(torch.cat(parts))
        down = reader(f"{at}.{made_of.down}.weight", hidden, size)
        self._down = kernels.row_parallel(kernels.pack(down))
        self._gate_up_bias: Tensor | None = None
        if config.mlp_bias:
            self._gate_up_bias = torch.cat(
                [reader(f"{at}.{name}.bias", rows) for name in made_of.gate_up]
            )
        self._down_bias = reader.optional(
            f"{at}.{made_of.down}.bias", hidden, wanted=config.mlp_bias
        )
        self._post_norm: Tensor | None = None
        if made_of.post_norm:
            name = f"{at}.{made_of.post_norm}.weight"
            self._post_norm = reader.norm(name, hidden, offset=norm_offset)

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights, in bytes."""
        optional = (self._gate_up_bias, self._down_bias, self._post_norm)
        rows = sum(row.nbytes for row in optional if row is not None)
        return self._gate_up.nbytes + self._down.nbytes + rows

    def add_to(self, x: Tensor, normed: Tensor) -> None:
        """x [T, hidden] += output for the normed rows [T, hidden]."""
        kernels = self._kernels
        gate_up = add_bias(self._gate_up(normed), self._gate_up_bias)
        if self._gate == SWIGLU:
            opened = kernels.silu_mul(gate_up)
        else:
            opened = kernels.gate_mul(gate_up, self._gate)
        if self._post_norm is None:
            self._down.add_to(x, opened)
            add_bias(x, self._down_bias)
            return
        out = add_bias(self._down(opened), self._down_bias)
        x.add_(kernels.rms_norm(out, self._post_norm, self._eps))
