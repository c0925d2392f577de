"""oneDNN's uint8 x int8 product, by its torch operators."""

import torch
from torch import Tensor

ZERO_POINT = 128


def prepack(levels: Tensor) -> Tensor:
    """int8 [out, in] in oneDNN's blocked layout."""
    packed: Tensor = torch.ops.onednn.qlinear_prepack(levels, None)
    return packed


def integer_product(x: Tensor, packed: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """float32 [rows, out]: (x - ZERO_POINT) times the weight, summed as integers, times `scales`.

    Args:
        x: uint8 [rows, in].
        packed: of `prepack`.
        scales: float32 [out].
        zeros: int32 [out], all 0: the weight's zero points.
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
