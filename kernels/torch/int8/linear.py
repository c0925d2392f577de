"""Products of an int8 weight, with a scale per output channel, and rows quantized at run time.

The product is oneDNN's uint8 x int8 with zero point 128. It holds the weight in blocked layout and
returns float32 with the channel's scale applied. Measured on a busy core with AVX-512 VNNI at 2 to
128 rows, it takes 0.5 to 0.9 of the time of `torch._int_mm`, which leaves both scales to the
caller. The int8 x int8 form of the same call is hundreds of times slower.
"""

import functools

import torch
from torch import Tensor

from kernels.torch.int8.probe import require_integer_product
from kernels.torch.int8.product import ZERO_POINT, integer_product, prepack

MAX_INT8 = 127
"""Largest quantized value; -127 is the smallest."""
_TINY = 1e-30
"""Smallest scale, so that a row of zeros is not divided by 0."""


class Int8Linear:
    """See kernels.interface.Linear; x and the result are float32."""

    def __init__(self, weight: Tensor) -> None:
        """Quantize and pack a weight [out, in].

        Raises:
            UnsupportedError: this machine's integer product is missing, inexact or too slow.
        """
        _require_once()
        scales = _scales(weight)
        quantized = weight.div(scales).round_().to(torch.int8)
        self._scales = scales.view(-1)
        self._zeros = torch.zeros(weight.shape[0], dtype=torch.int32)
        self._weight = prepack(quantized)
        self.nbytes = quantized.nbytes + self._scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        quantized, scales = quantize_rows(x)
        out = integer_product(quantized, self._weight, self._scales, self._zeros)
        return out.mul_(scales)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        quantized, scales = quantize_rows(x)
        out = integer_product(quantized, self._weight, self._scales, self._zeros)
        residual.addcmul_(out, scales)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row on its own: uint8 [rows, in] around the zero point, scales [rows, 1].

    The conversion goes through int8 and flips the high bit: PyTorch converts float32 to int8
    several times as fast as to uint8.
    """
    scales = _scales(x)
    signed = x.div(scales).round_().to(torch.int8)
    return signed.view(torch.uint8).bitwise_xor_(ZERO_POINT), scales


def _scales(x: Tensor) -> Tensor:
    return x.abs().amax(-1, keepdim=True).div_(MAX_INT8).clamp_min_(_TINY)


@functools.cache
def _require_once() -> None:
    require_integer_product()
