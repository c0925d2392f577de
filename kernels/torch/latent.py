"""Latent attention with PyTorch's operators, for CPUs and GPUs.

The heads of a row share their keys, so they are the rows of one product. With an indexer, positions
that a row does not attend to are masked: the work is that of attention to all positions.
"""

import torch
from torch import Tensor
from torch.nn import functional

from kernels.interface import AttentionGroup
from kernels.latent import IndexQuery, LatentKernels

SCORES = 1 << 24
"""Scores in memory at one time, at most, or those of one row if these are more."""


class BatchedHeads:
    """See kernels.latent.HeadLinear: one batched product."""

    def __init__(self, weight: Tensor) -> None:
        self._transposed = weight.transpose(1, 2).contiguous()
        self.nbytes = self._transposed.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return torch.bmm(x.transpose(0, 1), self._transposed).transpose(0, 1)


def attention(
    q: Tensor,
    cache: Tensor,
    group: AttentionGroup,
    rank: int,
    scale: float,
    index: IndexQuery | None,
) -> Tensor:
    """See kernels.latent.LatentKernels.attention; everything is summed in float32."""
    batch = len(group.starts)
    history = _gather(cache, group.block_tables).float()
    ends = _ends(group, len(q) // batch, q.device)
    positions = torch.arange(history.shape[1], device=q.device)
    keys = None if index is None else _gather(index.cache, group.block_tables).float()
    heads = max(q.shape[1], 0 if index is None else index.queries.shape[1])
    at_once = max(1, SCORES // (heads * history.shape[1]))
    parts = []
    for at in range(0, len(q), at_once):
        rows = slice(at, at + at_once)
        # Decodes: a row has a history of its own. A prompt: all rows have the same one.
        own = slice(0, 1) if batch == 1 else rows
        seen = positions < ends[rows].unsqueeze(1)
        if index is not None and keys is not None:
            seen = seen & chosen(_index_scores(index, rows, keys[own], seen), index.top_k)
        parts.append(_attend(q[rows].float(), history[own], seen, rank, scale))
    return torch.cat(parts).to(q.dtype)


def _attend(q: Tensor, history: Tensor, seen: Tensor, rank: int, scale: float) -> Tensor:
    """[rows, H, R]; history [rows or 1, positions, W], seen [rows, positions]."""
    rows, heads, width = q.shape
    queries = q.reshape(len(history), -1, width)
    scores = torch.bmm(queries, history.transpose(1, 2)).view(rows, heads, -1)
    scores = scores.mul_(scale).masked_fill_(~seen.unsqueeze(1), float("-inf"))
    weights = scores.softmax(-1).view(len(history), -1, history.shape[1])
    return torch.bmm(weights, history[..., :rank]).view(rows, heads, rank)


def _index_scores(index: IndexQuery, rows: slice, keys: Tensor, seen: Tensor) -> Tensor:
    """[rows, positions] float32, -inf where the row does not attend; keys [rows or 1, ...]."""
    queries, weights = index.queries[rows], index.weights[rows]
    count, heads, width = queries.shape
    flat = queries.reshape(len(keys), -1, width).float()
    each = torch.bmm(flat, keys.transpose(1, 2)).relu_().view(count, heads, -1)
    total = torch.bmm(weights.unsqueeze(1), each).squeeze(1)
    return total.masked_fill_(~seen, float("-inf"))


def chosen(scores: Tensor, top_k: int) -> Tensor:
    """Which positions are among a row's best: [rows, positions] bool; the earlier wins a tie.

    The value of the k-th best does not depend on how `topk` breaks ties, so neither does the result
    depend on how many positions are masked.
    """
    if scores.shape[1] <= top_k:
        return torch.ones_like(scores, dtype=torch.bool)
    least = scores.topk(top_k, dim=-1).values[:, -1:]
    above, equal = scores > least, scores == least
    left = top_k - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= left))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See kernels.latent.LatentKernels.layer_norm."""
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


def _gather(cache: Tensor, tables: Tensor) -> Tensor:
    """Copy whole blocks in order: [sequences, positions, width]."""
    flat = cache.view(len(cache), -1).index_select(0, tables.flatten())
    return flat.view(len(tables), -1, cache.shape[-1])


def _ends(group: AttentionGroup, each: int, device: torch.device) -> Tensor:
    """How many positions each row attends to, the first ones: [rows] int64."""
    if group.lengths is not None:
        return group.lengths.long()
    return torch.arange(1, each + 1, device=device) + group.starts[0]


LATENT = LatentKernels(pack_heads=BatchedHeads, attention=attention, layer_norm=layer_norm)
