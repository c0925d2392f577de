"""Norm, rotation and storage of a round's heads in one launch.

One program has HEAD_TILE heads of a row.
Every step rounds to the number format as the separate kernels do (`rms_norm`, `rope`, `kv_write`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.products.rounding import round_to

HEAD_TILE = 8
"""Heads of one program."""


@triton.jit
def place_heads_kernel(
    qkv, query_norm, key_norm, cos_sin, cache, slots, eps, row_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr,
    NORMED: tl.constexpr, HEAD_TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)[:, None]
    at = tl.arange(0, TILE)[None, :]
    inside = (head < HEADS + 2 * KV_HEADS) & (at < DIM)
    turned = head < HEADS + KV_HEADS
    own = qkv + row * row_stride + head * DIM + at
    x = tl.load(own, mask=inside, other=0.0)
    wide = x.to(tl.float32)
    if NORMED:
        scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=1) / DIM + eps)
        of_query = tl.load(query_norm + at, mask=at < DIM, other=0.0)
        of_key = tl.load(key_norm + at, mask=at < DIM, other=0.0)
        wide = wide * scale[:, None]
        if of_query.dtype != tl.float32:  # as in rms_norm
            wide = round_to(wide, x.dtype).to(tl.float32)
        wide = wide * tl.where(head < HEADS, of_query, of_key).to(tl.float32)
        wide = round_to(wide, x.dtype).to(tl.float32)
    even, odd = tl.split(tl.reshape(wide, (HEAD_TILE, TILE // 2, 2)))
    pair = tl.arange(0, TILE // 2)[None, :]
    angle = cos_sin + row * DIM + 2 * pair
    cos = tl.load(angle, mask=pair < DIM // 2, other=1.0)
    sin = tl.load(angle + 1, mask=pair < DIM // 2, other=0.0)
    rotated = round_to(tl.interleave(even * cos - odd * sin, even * sin + odd * cos), x.dtype)
    x = tl.where(turned, rotated, x)
    tl.store(own, x, mask=inside & turned)
    slot = tl.load(slots + row).to(tl.int64)
    place = cache + (slot * (2 * KV_HEADS) + head - HEADS) * DIM + at
    tl.store(place, x, mask=inside & (head >= HEADS))


def place_heads(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cos_sin: Tensor,
    cache: Tensor,
    slots: Tensor,
) -> None:
    """See kernels.interface.Kernels.place_heads.

    Raises:
        ValueError: a shape, format, stride or device does not fit.
    """
    rows, heads, dim = qkv.shape
    _check(qkv, norms, cos_sin, cache, slots)
    if rows:
        kv_heads = cache.shape[2] // 2
        query_norm, key_norm = norms or (qkv, qkv)
        place_heads_kernel[(rows, triton.cdiv(heads, HEAD_TILE))](
            qkv, query_norm, key_norm, cos_sin, cache, slots, eps, qkv.stride(0),
            HEADS=heads - 2 * kv_heads, KV_HEADS=kv_heads, DIM=dim,
            TILE=triton.next_power_of_2(dim), NORMED=norms is not None,
            HEAD_TILE=HEAD_TILE, num_warps=1,
        )  # fmt: skip


def _check(
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    cos_sin: Tensor,
    cache: Tensor,
    slots: Tensor,
) -> None:
    rows, heads, dim = qkv.shape
    if dim % 2 or qkv.stride()[1:] != (dim, 1) or heads <= cache.shape[2]:
        raise ValueError(
            f"place_heads: qkv {tuple(qkv.shape)} must be [T, H + 2 G, D] with even D, adjacent "
            f"heads and more heads than the cache's {cache.shape[2]}"
        )
    if cache.shape[3] != dim or cache.dtype != qkv.dtype or not cache.is_contiguous():
        raise ValueError(
            f"place_heads: cache must be contiguous {qkv.dtype} [blocks, block size, 2 G, {dim}], "
            f"got {cache.dtype} {tuple(cache.shape)}"
        )
    if cos_sin.shape != (rows, dim // 2, 2) or cos_sin.dtype != torch.float32:
        raise ValueError(
            f"place_heads: cos_sin must be float32 {(rows, dim // 2, 2)}, got {cos_sin.dtype} "
            f"{tuple(cos_sin.shape)}"
        )
    if slots.shape != (rows,) or slots.dtype != torch.int64:
        raise ValueError(
            f"place_heads: slots must be int64 [{rows}], got {slots.dtype} {tuple(slots.shape)}"
        )
    for norm in norms or ():
        if norm.shape != (dim,) or norm.dtype not in (qkv.dtype, torch.float32):
            raise ValueError(
                f"place_heads: norms must be {qkv.dtype} or float32 [{dim}], got {norm.dtype} "
                f"{tuple(norm.shape)}"
            )
    for name, other in (("cos_sin", cos_sin), ("slots", slots), ("norms", (norms or (slots,))[0])):
        if other.device != qkv.device or not other.is_contiguous():
            raise ValueError(f"place_heads: {name} must be contiguous and on {qkv.device}")
    if cache.device != qkv.device:
        raise ValueError(f"place_heads: the cache is on {cache.device}, qkv on {qkv.device}")
