"""What the products read of a weight in any format, checked before a launch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.triton.products.codes import CodedWeight

Weight = Tensor | CodedWeight
_FORMATS = {"float8": 1, "float4": 2, "int8": 3, "int4": 4}  # see accumulate.py
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Operand:
    """Arguments of a kernel for one weight [..., R, C]."""

    numbers: Tensor
    scales: Tensor
    zeros: Tensor
    shape: tuple[int, ...]
    format: int
    group: int
    """Columns that share a scale; C for a plain weight."""

    def depth_tile(self, wanted: int) -> int:
        """Columns of a step: a step never holds two groups of integers or of float8."""
        split = self.format in (1, 3, 4) and self.group < self.shape[-1]
        return min(wanted, self.group) if split else wanted


def operand(weight: Weight) -> Operand:
    """The arguments for a weight; a plain one has no scales, and its own pointer stands for them.

    Raises:
        ValueError: a plain weight is not contiguous.
    """
    if isinstance(weight, CodedWeight):
        zeros = weight.codes if weight.zeros is None else weight.zeros
        form = _FORMATS[weight.format]
        return Operand(weight.codes, weight.scales, zeros, weight.shape, form, weight.group)
    if not weight.is_contiguous():
        raise ValueError(
            f"weight {tuple(weight.shape)} must be contiguous, its strides are {weight.stride()}"
        )
    return Operand(weight, weight, weight, tuple(weight.shape), 0, weight.shape[-1])


def check_rows(name: str, x: Tensor, weight: Operand) -> None:
    """Check that rows x [T, C] fit the weight.

    Raises:
        ValueError: a shape, format, stride or device does not fit.
    """
    if x.dim() != 2 or x.shape[1] != weight.shape[-1]:
        raise ValueError(
            f"{name}: rows {tuple(x.shape)} do not fit weights {weight.shape} [..., out, in]"
        )
    if x.stride(1) != 1 or x.dtype not in FLOATS or x.device != weight.numbers.device:
        raise ValueError(
            f"{name}: rows must be floats with adjacent elements on {weight.numbers.device}, they "
            f"are {x.dtype} on {x.device} with strides {x.stride()}"
        )
    if weight.format == 0 and weight.numbers.dtype != x.dtype:
        raise ValueError(f"{name}: rows are {x.dtype}, but weights are {weight.numbers.dtype}")
