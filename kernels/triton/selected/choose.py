"""Launches an indexer's choice of the entries that each row attends to."""

import torch
import triton
from torch import Tensor

from kernels.ragged import RaggedBatch
from kernels.triton.checks import FLOATS, check
from kernels.triton.interpreted import INTERPRETED
from kernels.triton.ragged.attention import check_batch
from kernels.triton.selected.best import best_kernel
from kernels.triton.selected.scores import index_scores_kernel

SCORES = 1 << 28
"""Scores in memory at one time, at most, or those of one row if these are more: 1 GiB."""
_NAME = "index choice"
_QUERIES = 8
"""Rows of a sequence that read a tile of keys together."""
_TILE = 64
_BEST_TILE = 1024


def choose(
    queries: Tensor,
    weights: Tensor,
    cache: Tensor,
    batch: RaggedBatch,
    *,
    top_k: int,
    ratio: int = 1,
    block_size: int | None = None,
) -> Tensor:
    """The entries that rows attend to: those of the highest scores among the visible ones.

    A score is the sum over index heads of weight * ReLU(query . key). Of equal scores the earlier
    entry wins. Source: DeepSeek-AI 2025 (DeepSeek-V3.2), equation 1.

    Args:
        queries: [T, heads, D].
        weights: [T, heads] float32, all constant factors included.
        cache: [blocks, entries per block, D]: keys of the entries.
        batch: the sequences; the entries that this round completes are in the cache already.
        top_k: entries per row, at most.
        ratio: positions that an entry stands for; a row sees those that end at its position or
            before.
        block_size: positions of a block; None: ratio times the entries per block.

    Returns:
        [T, top_k] int32, or narrower where no sequence has so many entries: numbers of entries
        within their sequence, ascending, then -1. Rows beyond the last sequence are undefined.

    Raises:
        ValueError: shapes, formats, strides or devices do not fit; the message names the tensor.
    """
    _check(queries, weights, cache, batch, top_k, ratio)
    rows, most = len(queries), max(1, batch.max_length // ratio)
    chosen = torch.empty(rows, min(top_k, most), dtype=torch.int32, device=queries.device)
    if not rows or not len(batch.lengths):
        return chosen
    at_once = max(1, SCORES // most)
    scores = torch.empty(min(rows, at_once), most, dtype=torch.float32, device=queries.device)
    block = block_size or ratio * cache.shape[1]
    for first in range(0, rows, at_once):
        part = slice(first, min(first + at_once, rows))
        _score(queries, weights, cache, batch, scores, part, ratio, block)
        best_kernel[(part.stop - first,)](
            scores, batch.query_starts, batch.lengths, chosen, first, scores.stride(0),
            len(batch.lengths), TOP_K=chosen.shape[1], RATIO=ratio, TILE=_BEST_TILE, num_warps=4,
        )  # fmt: skip
    return chosen


def _score(queries, weights, cache, batch, scores, part: slice, ratio: int, block: int) -> None:
    """Write the scores of some rows."""
    rows, heads, dim = queries.shape
    sequences = len(batch.lengths)
    grid = (rows // _QUERIES + sequences, triton.cdiv(scores.shape[1], _TILE))
    index_scores_kernel[grid](
        queries, weights, cache, batch.block_tables, batch.query_starts, batch.lengths, scores,
        part.start, part.stop, scores.stride(0), queries.stride(0), queries.stride(1),
        weights.stride(0), batch.block_tables.stride(0), sequences,
        HEADS=heads, DIM=dim, BLOCK=block, PER_BLOCK=cache.shape[1], RATIO=ratio,
        QUERIES=_QUERIES, HEAD_TILE=max(16, triton.next_power_of_2(heads)),
        DIM_TILE=max(16, triton.next_power_of_2(dim)), TILE=_TILE, WIDEN=INTERPRETED,
        num_warps=4, num_stages=1,
    )  # fmt: skip


def _check(
    queries: Tensor, weights: Tensor, cache: Tensor, batch: RaggedBatch, top_k: int, ratio: int
) -> None:
    device = queries.device
    check(_NAME, "queries", queries, (None, None, None), FLOATS, device, adjacent_only=True)
    rows, heads, dim = queries.shape
    check(_NAME, "weights", weights, (rows, heads), (torch.float32,), device, adjacent_only=True)
    check(_NAME, "cache", cache, (None, None, dim), (queries.dtype,), device)
    check_batch(_NAME, batch, device)
    if top_k < 1 or ratio < 1:
        raise ValueError(f"{_NAME}: top_k {top_k} and ratio {ratio} must be 1 or more")
