"""Launches attention of a ragged batch over paged keys and values."""

import math

import torch
import triton
from torch import Tensor

from kernels.ragged import RaggedBatch
from kernels.triton.checks import FLOATS, check
from kernels.triton.interpreted import INTERPRETED
from kernels.triton.ragged.decode import decode_join_kernel, decode_split_kernel
from kernels.triton.ragged.extend import extend_kernel
from kernels.triton.ragged.tiles import SPLIT, Tiles, tiles_for

_NAME = "ragged attention"
_FP8 = torch.float8_e4m3fn
JOINED = 4
"""Heads that one program joins the splits of."""


def attention(
    q: Tensor,
    cache: Tensor,
    batch: RaggedBatch,
    *,
    scale: float | None,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    kv_scales: Tensor | None = None,
) -> Tensor:
    """See kernels.ragged.RaggedAttention.

    Args:
        kv_scales: [2 G] float32: what stored keys and values of each head are multiplied by. The
            cache may be float8_e4m3fn only with them.
    """
    _check(q, cache, batch, sinks, kv_scales)
    if window < 0 or soft_cap < 0:
        raise ValueError(f"{_NAME}: window {window} and soft cap {soft_cap} must be 0 or more")
    rows, heads, dim = q.shape
    out = torch.empty(rows, heads * dim, dtype=q.dtype, device=q.device)
    kv_heads = cache.shape[2] // 2
    tiles, padded = tiles_for(dim, q.element_size())
    shapes = {
        "KV_HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "HEADS": min(heads // kv_heads, tiles.rows),
        "DIM": dim,
        "BLOCK": cache.shape[1],
        "WINDOW": window,
        "CAPPED": soft_cap > 0,
        "SCALED": kv_scales is not None,
        "WIDEN": INTERPRETED,
        "SPLIT": SPLIT,
        "ROWS": tiles.rows,
        "DIM_TILE": padded,
        "TILE": tiles.positions,
    }
    factor = 1 / math.sqrt(dim) if scale is None else scale
    if batch.num_decodes:
        _decode(q, cache, batch, sinks, kv_scales, out, (factor, soft_cap), shapes, tiles)
    if len(batch.lengths) > batch.num_decodes and rows > batch.num_decodes:
        _extend(q, cache, batch, sinks, kv_scales, out, (factor, soft_cap), shapes, tiles)
    return out


def _decode(q, cache, batch, sinks, kv_scales, out, numbers, shapes, tiles: Tiles) -> None:
    heads, dim, window = q.shape[1], q.shape[2], shapes["WINDOW"]
    splits = max(1, triton.cdiv(batch.max_length, SPLIT))
    if window:
        # A window that does not begin at a split's first position reaches into one more.
        splits = min(splits, triton.cdiv(window - 1, SPLIT) + 1)
    shape = (batch.num_decodes, heads, splits)
    peaks = torch.empty(shape, dtype=torch.float32, device=q.device)
    totals, parts = torch.empty_like(peaks), peaks.new_empty(*shape, dim)
    chunks = triton.cdiv(shapes["GROUP"], shapes["HEADS"])
    decode_split_kernel[(batch.num_decodes, shapes["KV_HEADS"] * chunks, splits)](
        q, cache, batch.block_tables, batch.lengths, kv_scales, peaks, totals, parts, *numbers,
        q.stride(0), q.stride(1), batch.block_tables.stride(0),
        **shapes, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    own = ("KV_HEADS", "GROUP", "DIM", "WINDOW", "SCALED", "SPLIT", "DIM_TILE")
    decode_join_kernel[(batch.num_decodes, triton.cdiv(heads, JOINED))](
        peaks, totals, parts, batch.lengths, sinks, kv_scales, out, splits,
        **{name: shapes[name] for name in own}, HAS_SINKS=sinks is not None, ROWS=JOINED,
        num_warps=2,
    )  # fmt: skip


def _extend(q, cache, batch, sinks, kv_scales, out, numbers, shapes, tiles: Tiles) -> None:
    first, count = batch.num_decodes, len(batch.lengths)
    queries = tiles.rows // shapes["HEADS"]
    chunks = triton.cdiv(shapes["GROUP"], shapes["HEADS"])
    grid = ((len(q) - first) // queries + count - first, shapes["KV_HEADS"] * chunks)
    extend_kernel[grid](
        q, cache, batch.block_tables, batch.query_starts, batch.lengths, sinks, kv_scales, out,
        *numbers, q.stride(0), q.stride(1), batch.block_tables.stride(0), first, count,
        **shapes, HAS_SINKS=sinks is not None, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


def check_batch(operation: str, batch: RaggedBatch, device: torch.device) -> None:
    """Refuse a batch whose tensors do not fit together.

    Raises:
        ValueError: the message names the tensor.
    """
    count = len(batch.lengths)
    ints = (torch.int32,)
    check(operation, "lengths", batch.lengths, (count,), ints, device)
    check(operation, "query_starts", batch.query_starts, (count + 1,), ints, device)
    check(
        operation, "block_tables", batch.block_tables, (count, None), ints, device,
        adjacent_only=True,
    )  # fmt: skip
    if not 0 <= batch.num_decodes <= count:
        raise ValueError(
            f"{operation}: num_decodes is {batch.num_decodes}, it must be 0 to {count}, the "
            "number of sequences"
        )


def _check(
    q: Tensor, cache: Tensor, batch: RaggedBatch, sinks: Tensor | None, kv_scales: Tensor | None
) -> None:
    check(_NAME, "q", q, (None, None, None), FLOATS, q.device, adjacent_only=True)
    formats = (q.dtype,) if kv_scales is None else (q.dtype, _FP8)
    check(_NAME, "cache", cache, (None, None, None, q.shape[2]), formats, q.device)
    kv_heads, odd = divmod(cache.shape[2], 2)
    if odd or not kv_heads or q.shape[1] % kv_heads:
        raise ValueError(
            f"{_NAME}: cache has {cache.shape[2]} heads of keys and values, it must have an even "
            f"number whose half divides the {q.shape[1]} query heads"
        )
    check_batch(_NAME, batch, q.device)
    if batch.num_decodes > len(q):
        raise ValueError(f"{_NAME}: num_decodes is {batch.num_decodes}, but q has {len(q)} rows")
    if sinks is not None:
        check(_NAME, "sinks", sinks, (q.shape[1],), FLOATS, q.device)
    if kv_scales is not None:
        check(_NAME, "kv_scales", kv_scales, (2 * kv_heads,), (torch.float32,), q.device)
