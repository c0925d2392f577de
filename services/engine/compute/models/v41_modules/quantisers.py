"""Roundings that DeepSeek V4.1 was trained with: they are part of the model in any number format.

Values become those of a small format times a scale per block of the last dimension, and are kept as
float32. A dimension that is no multiple of the block is left as it is. All operations are exact or
rounded in one way, so that a value's result does not depend on its place.
"""

import torch
from torch import Tensor

WINDOW_BLOCK = 32
ENTRY_BLOCK = 16
INDEX_BLOCK = 32
_E4M3_TOP = 448.0
_E2M1_TOP = 6.0
_E4M3_SMALLEST = 2.0**-9
_WINDOW_FLOOR = 1e-4
"""Least maximum of a block of window keys."""


def round_window_keys(x: Tensor) -> Tensor:
    """Keys [..., D] in e4m3 with a power of two per 32 elements."""
    if x.shape[-1] % WINDOW_BLOCK:
        return x
    blocks, largest = _blocks(x, WINDOW_BLOCK)
    scale = _power_of_two(largest.clamp(min=_WINDOW_FLOOR), _E4M3_TOP)
    return _e4m3(blocks / scale).mul_(scale).view(x.shape)


def round_entries(x: Tensor) -> Tensor:
    """Compressed entries [..., D] in e2m1 with an e4m3 number per 16 elements."""
    if x.shape[-1] % ENTRY_BLOCK:
        return x
    blocks, largest = _blocks(x, ENTRY_BLOCK)
    scale = _e4m3(largest.clamp(min=_E2M1_TOP * _E4M3_SMALLEST) / _E2M1_TOP)
    return _e2m1(blocks / scale).mul_(scale).view(x.shape)


def round_index(x: Tensor) -> Tensor:
    """Index queries and keys [..., D] in e2m1 with a power of two per 32 elements."""
    if x.shape[-1] % INDEX_BLOCK:
        return x
    blocks, largest = _blocks(x, INDEX_BLOCK)
    scale = _power_of_two(largest, _E2M1_TOP)
    return _e2m1(blocks / scale).mul_(scale).view(x.shape)


def _blocks(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Blocks [..., size] of the last dimension, and the largest absolute value of each."""
    blocks = x.reshape(*x.shape[:-1], -1, size)
    return blocks, blocks.abs().amax(-1, keepdim=True)


def _power_of_two(largest: Tensor, top: float) -> Tensor:
    """The smallest power of two by which `largest` is at most `top`; 2**-126 at least (ue8m0)."""
    mantissa, exponent = torch.frexp(largest / top)
    # A mantissa of 1/2 is a power of two itself. The bits are those of a float32.
    exponent = (exponent - (mantissa <= 0.5).int()).clamp_(min=-126)
    return ((exponent + 127) << 23).view(torch.float32)


def _e4m3(x: Tensor) -> Tensor:
    """The nearest FP8 value, ties to even; ±448 at most."""
    return x.clamp(-_E4M3_TOP, _E4M3_TOP).to(torch.float8_e4m3fn).float()


def _e2m1(x: Tensor) -> Tensor:
    """The nearest FP4 value, ties to the even code; ±6 at most.

    Neighbours are 0.5 apart below 2, 1 below 4, and 2 above; codes count them, so that a tie goes
    to the even multiple of the distance.
    """
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (x / step).round_().mul_(step).clamp_(-_E2M1_TOP, _E2M1_TOP)
