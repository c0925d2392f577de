"""Stores the keys and values of one round in their slots."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def kv_write_kernel(
    cache, kv, slots, row_stride, head_stride, HEADS: tl.constexpr, DIM: tl.constexpr,
    HEAD_TILE: tl.constexpr, DIM_TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    head = tl.arange(0, HEAD_TILE)[:, None]
    at = tl.arange(0, DIM_TILE)[None, :]
    inside = (head < HEADS) & (at < DIM)
    values = tl.load(kv + row * row_stride + head * head_stride + at, mask=inside)
    tl.store(cache + slot * (HEADS * DIM) + head * DIM + at, values, mask=inside)


def kv_write(cache: Tensor, kv: Tensor, slots: Tensor) -> None:
    """See kernels.interface.Kernels.kv_write; kv may be a slice of wider rows."""
    rows, heads, dim = kv.shape
    if cache.shape[2:] != kv.shape[1:] or not cache.is_contiguous() or kv.stride(2) != 1:
        raise ValueError(
            f"kv_write: cache {tuple(cache.shape)} must be contiguous and kv {tuple(kv.shape)} "
            f"[T, 2 G, D] with the cache's last two sizes and adjacent elements"
        )
    if rows:
        kv_write_kernel[(rows,)](
            cache, kv, slots, kv.stride(0), kv.stride(1), HEADS=heads, DIM=dim,
            HEAD_TILE=triton.next_power_of_2(heads), DIM_TILE=triton.next_power_of_2(dim),
            num_warps=4,
        )  # fmt: skip
