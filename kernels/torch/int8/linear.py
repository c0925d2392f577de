"""A weight in int8 with a scale per output channel, times rows quantised as they come.

The product is oneDNN's uint8 x int8 with the row's zero point at 128: it holds the weight in
blocked layout and gives float32 with the channel's scale applied. Measured on a busy core with
AVX-512 VNNI, 2 to 128 rows, it takes 0.5 to 0.9 of the time of `torch._int_mm`, which leaves both
scales to the caller; the int8 x int8 form of the same call is hundreds of times slower.
"""

import functools

import torch
from torch import Tensor

from kernels.torch.int8.probe import require_integer_product
from kernels.torch.int8.product import ZERO_POINT, integer_product, prepack

LEVELS = 127
_TINY = 1e-30
"""Smallest scale: a row of zeros stays zeros and nothing is divided by 0."""


class Int8Linear:
    """See kernels.interface.Linear; x and the result are float32."""

    def __init__(self, weight: Tensor) -> None:
        """Quantise and pack.

        Raises:
            UnsupportedError: this machine's integer product cannot be used.
        """
        _require_once()
        scales = _scales(weight)
        levels = weight.div(scales).round_().to(torch.int8)
        self._scales = scales.view(-1)
        self._zeros = torch.zeros(weight.shape[0], dtype=torch.int32)
        self._weight = prepack(levels)
        self.nbytes = levels.nbytes + self._scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        levels, scales = quantise_rows(x)
        out = integer_product(levels, self._weight, self._scales, self._zeros)
        return out.mul_(scales)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        levels, scales = quantise_rows(x)
        out = integer_product(levels, self._weight, self._scales, self._zeros)
        residual.addcmul_(out, scales)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 [rows, in] around the zero point, and scales [rows, 1]; of a row alone.

    By way of int8, whose high bit is then turned: torch converts float32 to int8 several times
    faster than to uint8.
    """
    scales = _scales(x)
    signed = x.div(scales).round_().to(torch.int8)
    return signed.view(torch.uint8).bitwise_xor_(ZERO_POINT), scales


def _scales(x: Tensor) -> Tensor:
    return x.abs().amax(-1, keepdim=True).div_(LEVELS).clamp_min_(_TINY)


@functools.cache
def _require_once() -> None:
    require_integer_product()
