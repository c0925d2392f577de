"""Weighted sum of the outputs of a row's experts, in the order of the row's choice."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.products.rounding import round_to

_TILE = 1024


@triton.jit
def combine_kernel(
    outputs, weights, ids, out, HAS_IDS: tl.constexpr, TOP_K: tl.constexpr, SIZE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < SIZE
    total = tl.zeros([TILE], tl.float32)
    for column in range(TOP_K):
        pair = row * TOP_K + column
        used = inside
        if HAS_IDS:
            used = inside & (tl.load(ids + pair) >= 0)
        value = tl.load(outputs + pair * SIZE + at, mask=used, other=0.0).to(tl.float32)
        total += tl.where(used, value * tl.load(weights + pair), 0.0)
    tl.store(out + row * SIZE + at, round_to(total, out.dtype.element_ty), mask=inside)


def combine(outputs: Tensor, weights: Tensor, ids: Tensor | None = None) -> Tensor:
    """See kernels.interface.Kernels.combine.

    Args:
        ids: [T, k] int64: the outputs of pairs with a negative id are not read.

    Raises:
        ValueError: a shape or format does not fit, or a tensor is not contiguous.
    """
    rows, top_k, size = outputs.shape
    for name, other in (("weights", weights), ("ids", ids)):
        if other is not None and (
            other.shape != (rows, top_k)
            or not other.is_contiguous()
            or other.device != outputs.device
        ):
            raise ValueError(
                f"combine: {name} must be contiguous {(rows, top_k)} on {outputs.device}, got "
                f"{tuple(other.shape)} on {other.device}"
            )
    if not outputs.is_contiguous() or weights.dtype != torch.float32:
        raise ValueError(
            f"combine: outputs must be contiguous and weights float32, not {weights.dtype}"
        )
    out = torch.empty(rows, size, dtype=outputs.dtype, device=outputs.device)
    if rows:
        tile = min(_TILE, triton.next_power_of_2(size))
        combine_kernel[(rows, triton.cdiv(size, tile))](
            outputs, weights, weights if ids is None else ids, out, HAS_IDS=ids is not None,
            TOP_K=top_k, SIZE=size, TILE=tile, num_warps=4,
        )  # fmt: skip
    return out
