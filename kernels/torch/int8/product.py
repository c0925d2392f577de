"""oneDNN's uint8 x int8 product, through its PyTorch operators."""

import torch
from torch import Tensor

ZERO_POINT = 128


def prepack(weight: Tensor) -> Tensor:
    """Convert an int8 weight [out, in] to oneDNN's blocked layout."""
    packed: Tensor = torch.ops.onednn.qlinear_prepack(weight, None)
    return packed


def integer_product(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """(x - ZERO_POINT) times the transposed weight, summed as integers, times `scales`.

    Args:
        x: uint8 [rows, in].
        packed: what `prepack` returned for a weight [out, in].
        scales: float32 [out].
        zeros: int32 [out], all 0: the weight's zero points.

    Returns:
        float32 [rows, out].
    """
    out: Tensor = torch.ops.onednn.qlinear_pointwise(
        x,
        1.0,
        ZERO_POINT,
        packed,
        scales,
        zeros,
        None,
        1.0,
        0,
        torch.float32,
        "none",
        [],
        "",
    )
    return out
