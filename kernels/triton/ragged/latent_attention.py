"""Launches attention of a ragged batch over latent vectors."""

import torch
import triton
from torch import Tensor

from kernels.latent import IndexQuery
from kernels.ragged import RaggedBatch
from kernels.triton.checks import FLOATS, check
from kernels.triton.interpreted import INTERPRETED
from kernels.triton.ragged.attention import JOINED, check_batch
from kernels.triton.ragged.decode import decode_join_kernel
from kernels.triton.ragged.latent import (
    latent_chosen_kernel,
    latent_decode_kernel,
    latent_extend_kernel,
)
from kernels.triton.ragged.tiles import SPLIT, Tiles
from kernels.triton.selected.choose import choose

_NAME = "latent attention"
LATENT_TILES = {
    2: Tiles(rows=32, positions=32, warps=8, stages=2),
    4: Tiles(rows=32, positions=16, warps=8, stages=2),
}
"""By bytes of an element. The sums of 32 heads and 512 elements take 64 registers of each of 256
threads, those of a split as many again: a prefill's thread spills 16 bytes on sm_90."""
_LARGEST = 512


def latent_attention(
    q: Tensor,
    cache: Tensor,
    batch: RaggedBatch,
    *,
    rank: int,
    scale: float,
    index: IndexQuery | None = None,
) -> Tensor:
    """See kernels.ragged.RaggedLatentAttention."""
    _check(q, cache, batch, rank, index)
    rows, heads, width = q.shape
    out = torch.empty(rows, heads, rank, dtype=q.dtype, device=q.device)
    tiles = LATENT_TILES[q.element_size()]
    shapes = {
        "COUNT": heads,
        "RANK": rank,
        "WIDTH": width,
        "BLOCK": cache.shape[1],
        "WIDEN": INTERPRETED,
        "ROWS": tiles.rows,
        "RANK_TILE": max(16, triton.next_power_of_2(rank)),
        "REST_TILE": max(16, triton.next_power_of_2(width - rank)),
        "TILE": tiles.positions,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
    }
    if not rows or not len(batch.lengths):
        return out
    if index is not None:
        _attend_chosen(q, cache, batch, index, out, scale, shapes)
        return out
    if batch.num_decodes:
        _decode(q, cache, batch, out, scale, shapes)
    if len(batch.lengths) > batch.num_decodes and rows > batch.num_decodes:
        _extend(q, cache, batch, out, scale, shapes)
    return out


def _decode(q, cache, batch, out, scale, shapes) -> None:
    count, rank, number = shapes["COUNT"], shapes["RANK"], batch.num_decodes
    splits = max(1, triton.cdiv(batch.max_length, SPLIT))
    peaks = torch.empty(number, count, splits, dtype=torch.float32, device=q.device)
    totals, parts = torch.empty_like(peaks), peaks.new_empty(number, count, splits, rank)
    latent_decode_kernel[(number, triton.cdiv(count, shapes["ROWS"]), splits)](
        q, cache, batch.block_tables, batch.lengths, peaks, totals, parts, scale,
        q.stride(0), q.stride(1), batch.block_tables.stride(0), SPLIT=SPLIT, **shapes,
    )  # fmt: skip
    decode_join_kernel[(number, triton.cdiv(count, JOINED))](
        peaks, totals, parts, batch.lengths, None, None, out, splits,
        KV_HEADS=1, GROUP=count, DIM=rank, WINDOW=0, HAS_SINKS=False, SCALED=False, SPLIT=SPLIT,
        ROWS=JOINED, DIM_TILE=shapes["RANK_TILE"], num_warps=4,
    )  # fmt: skip


def _extend(q, cache, batch, out, scale, shapes) -> None:
    first, count = batch.num_decodes, len(batch.lengths)
    heads = min(shapes["COUNT"], shapes["ROWS"])
    grid = (
        (len(q) - first) // (shapes["ROWS"] // heads) + count - first,
        triton.cdiv(shapes["COUNT"], heads),
    )
    latent_extend_kernel[grid](
        q, cache, batch.block_tables, batch.query_starts, batch.lengths, out, scale,
        q.stride(0), q.stride(1), batch.block_tables.stride(0), first, count,
        HEADS=heads, SPLIT=SPLIT, **shapes,
    )  # fmt: skip


def _attend_chosen(q, cache, batch, index: IndexQuery, out, scale, shapes) -> None:
    chosen = choose(index.queries, index.weights, index.cache, batch, top_k=index.top_k)
    latent_chosen_kernel[(len(q), triton.cdiv(shapes["COUNT"], shapes["ROWS"]))](
        q, cache, batch.block_tables, batch.query_starts, chosen, out, scale,
        q.stride(0), q.stride(1), batch.block_tables.stride(0), len(batch.lengths),
        CHOSEN=chosen.shape[1], **shapes,
    )  # fmt: skip


def _check(
    q: Tensor, cache: Tensor, batch: RaggedBatch, rank: int, index: IndexQuery | None
) -> None:
    check(_NAME, "q", q, (None, None, None), FLOATS, q.device, adjacent_only=True)
    width = q.shape[2]
    check(_NAME, "cache", cache, (None, None, width), (q.dtype,), q.device)
    if not 0 < rank < width or rank > _LARGEST:
        raise ValueError(
            f"{_NAME}: rank is {rank}, it must be 1 to {_LARGEST} and less than {width}, the "
            "elements of a latent with its rotated part"
        )
    check_batch(_NAME, batch, q.device)
    if batch.num_decodes > len(q):
        raise ValueError(f"{_NAME}: num_decodes is {batch.num_decodes}, but q has {len(q)} rows")
    if index is not None and len(index.queries) != len(q):
        raise ValueError(f"{_NAME}: index.queries has {len(index.queries)} rows, q has {len(q)}")
