"""Products with a weight in oneDNN's blocked layout, or in plain layout where oneDNN has none.

Measured on 2 cores with AVX-512 in float32: the blocked layout is 2 to 3 times as fast as
`torch.mm` at 4 to 128 rows. A product of fewer than 4 rows takes longer than one of 4.
"""

import torch
from torch import Tensor

from kernels.interface import Linear

MIN_ROWS = 4
_PACK_ROWS = 32
"""Rows that oneDNN optimises the layout for; other counts run well on it too."""


def pack_linear(weight: Tensor) -> Linear:
    """See kernels.interface.Kernels.pack: the fastest layout for the weight's device."""
    if weight.device.type == "cpu" and torch._C._has_mkldnn and _can_reorder(weight.dtype):
        return PackedLinear(weight)
    return DenseLinear(weight)


def _can_reorder(dtype: torch.dtype) -> bool:
    """Whether oneDNN has a blocked layout for the format; bfloat16 needs AVX-512 for it."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class DenseLinear:
    """See kernels.interface.Linear; the weight stays in plain layout."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight.contiguous()
        self._transposed = self._weight.T

    def __call__(self, x: Tensor) -> Tensor:
        return torch.mm(x, self._transposed)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        residual.addmm_(x, self._transposed)

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes


class PackedLinear:
    """See kernels.interface.Linear; the weight is in oneDNN's blocked layout."""

    def __init__(self, weight: Tensor) -> None:
        self.nbytes = weight.nbytes
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        if rows < MIN_ROWS:
            # Padding repeats rows: padding with zeros would take several more operator calls.
            return self._product(x.repeat(-(-MIN_ROWS // max(rows, 1)), 1))[:rows]
        return self._product(x)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        residual.add_(self(x))

    def _product(self, x: Tensor) -> Tensor:
        out: Tensor = self._multiply(x, self._weight, None, "none", [], "")
        return out
