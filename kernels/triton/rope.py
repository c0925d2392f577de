"""Rotary embedding in Triton, in place; one program rotates all heads of a row."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rope_kernel(
    qk, cos_sin, row_stride, head_stride, HEADS: tl.constexpr, HALF: tl.constexpr,
    HEAD_TILE: tl.constexpr, HALF_TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEAD_TILE)[:, None]
    pair = tl.arange(0, HALF_TILE)[None, :]
    known = pair < HALF
    inside = (head < HEADS) & known
    angle = cos_sin + row * (2 * HALF) + 2 * pair
    cos = tl.load(angle, mask=known, other=1.0)
    sin = tl.load(angle + 1, mask=known, other=0.0)
    where = qk + row * row_stride + head * head_stride + 2 * pair
    even = tl.load(where, mask=inside, other=0.0)
    odd = tl.load(where + 1, mask=inside, other=0.0)
    a, b = even.to(tl.float32), odd.to(tl.float32)
    tl.store(where, (a * cos - b * sin).to(even.dtype), mask=inside)
    tl.store(where + 1, (a * sin + b * cos).to(odd.dtype), mask=inside)


def rope(qk: Tensor, cos_sin: Tensor) -> None:
    """See kernels.interface.Kernels.rope; qk may be a slice of wider rows."""
    rows, heads, dim = qk.shape
    if qk.stride(2) != 1 or cos_sin.shape != (rows, dim // 2, 2) or not cos_sin.is_contiguous():
        raise ValueError(
            f"rope: for qk {tuple(qk.shape)} with adjacent elements, cos_sin must be contiguous "
            f"{(rows, dim // 2, 2)}, got {tuple(cos_sin.shape)}"
        )
    if rows:
        rope_kernel[(rows,)](
            qk, cos_sin, qk.stride(0), qk.stride(1), HEADS=heads, HALF=dim // 2,
            HEAD_TILE=triton.next_power_of_2(heads), HALF_TILE=triton.next_power_of_2(dim // 2),
            num_warps=4,
        )  # fmt: skip
