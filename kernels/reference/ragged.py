"""Attention over a ragged batch by its definition: one row and one head at a time, in float32."""

import itertools
import math

import torch
from torch import Tensor

from kernels.interface import AttentionGroup
from kernels.latent import IndexQuery
from kernels.ragged import RaggedBatch
from kernels.reference import latent


def attention(
    q: Tensor,
    cache: Tensor,
    batch: RaggedBatch,
    *,
    scale: float | None,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """See kernels.ragged.RaggedAttention; rows beyond the last sequence are zero."""
    rows, heads, dim = q.shape
    kv_heads = cache.shape[2] // 2
    factor = 1 / math.sqrt(dim) if scale is None else scale
    out = torch.zeros(rows, heads, dim, dtype=q.dtype, device=q.device)
    for row, table, end in rows_of(batch, cache.shape[1]):
        first = max(0, end - window) if window else 0
        visible = cache[table].flatten(0, 1)[first:end].float()
        for head in range(heads):
            shared = head // (heads // kv_heads)
            scores = visible[:, shared] @ q[row, head].float() * factor
            if soft_cap:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if sinks is not None:
                scores = torch.cat((scores, sinks[head : head + 1].float()))
            weights = scores.softmax(-1)[: len(visible)]
            out[row, head] = (weights @ visible[:, kv_heads + shared]).to(q.dtype)
    return out.flatten(1)


def latent_attention(
    q: Tensor,
    cache: Tensor,
    batch: RaggedBatch,
    *,
    rank: int,
    scale: float,
    index: IndexQuery | None = None,
) -> Tensor:
    """See kernels.ragged.RaggedLatentAttention; rows beyond the last sequence are zero."""
    out = torch.zeros(*q.shape[:2], rank, dtype=q.dtype, device=q.device)
    for row, table, end in rows_of(batch, cache.shape[1]):
        one = slice(row, row + 1)
        group = AttentionGroup(one, (end - 1,), table.view(1, -1), None, False)
        own = None if index is None else index.of_rows(one)
        out[one] = latent.attention(q[one], cache, group, rank, scale, own)
    return out


def rows_of(batch: RaggedBatch, block: int) -> list[tuple[int, Tensor, int]]:
    """Row, its sequence's blocks, and number of positions up to its own, of each row in use."""
    starts, lengths = batch.query_starts.tolist(), batch.lengths.tolist()
    rows = []
    for sequence, (first, stop) in enumerate(itertools.pairwise(starts)):
        table = batch.block_tables[sequence, : -(-lengths[sequence] // block)].long()
        rows += [(row, table, lengths[sequence] - (stop - row) + 1) for row in range(first, stop)]
    return rows
