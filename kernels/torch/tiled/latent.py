"""Latent attention over tiles aligned to absolute positions; see attention.py beside this file.

A query at position p is always row p mod Q of its tile of queries, and the positions 0 .. p are
added in tiles of KEYS, in order. Index scores are computed on the same tiles, and which positions
they choose does not depend on how many are masked.
"""

import torch
from torch import Tensor
from torch.nn import functional

from kernels.interface import AttentionGroup
from kernels.latent import IndexQuery, LatentKernels
from kernels.torch.latent import chosen
from kernels.torch.tiled.attention import KEYS, queries_per_tile
from kernels.torch.tiled.layers import ROWS, TiledLinear, whole_tile


class TiledHeads:
    """See kernels.latent.HeadLinear; each head's product is a `TiledLinear`."""

    def __init__(self, weight: Tensor) -> None:
        self._heads = [TiledLinear(head) for head in weight]
        self.nbytes = sum(head.nbytes for head in self._heads)

    def __call__(self, x: Tensor) -> Tensor:
        each = [head(x[:, index].contiguous()) for index, head in enumerate(self._heads)]
        return torch.stack(each, dim=1)


def attention(
    q: Tensor,
    cache: Tensor,
    group: AttentionGroup,
    rank: int,
    scale: float,
    index: IndexQuery | None,
) -> Tensor:
    """See kernels.latent.LatentKernels.attention."""
    rows, heads, _ = q.shape
    each = rows // len(group.starts)
    size = queries_per_tile(heads)
    out = q.new_empty(rows, heads, rank)
    for sequence, start in enumerate(group.starts):
        table, end = group.block_tables[sequence], start + each
        history = _tiles(cache, table, end)
        keys = None if index is None else _tiles(index.cache, table, end)
        for first in range(start // size * size, end, size):
            low, high = max(first, start), min(first + size, end)
            # The tile's own rows, and where they are in the tile.
            own = slice(sequence * each + low - start, sequence * each + high - start)
            at = slice(low - first, high - first)
            seen = _causal(first, size)
            if index is not None and keys is not None:
                seen &= chosen(_index_scores(index, own, at, keys, seen), index.top_k)
            tile = q.new_zeros(size, heads, q.shape[2])
            tile[at] = q[own]
            out[own] = _attend(tile, history, seen, rank, scale)[at]
    return out


def _tiles(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """[tiles, KEYS, width]; positions from `length` on must be masked."""
    block_size, width = cache.shape[1:]
    tiles = -(-length // KEYS)
    blocks = -(-tiles * KEYS // block_size)
    known = table[:blocks]
    padded = functional.pad(known, (0, blocks - known.shape[0]))
    flat = cache.index_select(0, padded).view(-1, width)[: tiles * KEYS]
    return flat.reshape(tiles, KEYS, width)


def _causal(first: int, size: int) -> Tensor:
    """Which positions the queries of a tile attend to: [size, tiles * KEYS] bool."""
    last = (first + size - 1) // KEYS
    queries = torch.arange(first, first + size).unsqueeze(1)
    return torch.arange((last + 1) * KEYS) <= queries


def _index_scores(index: IndexQuery, own: slice, at: slice, keys: Tensor, seen: Tensor) -> Tensor:
    """[size, positions] float32, -inf where the row does not attend."""
    size, positions = seen.shape
    heads, width = index.queries.shape[1:]
    queries = index.queries.new_zeros(size, heads, width)
    queries[at] = index.queries[own]
    weights = index.weights.new_zeros(size, heads, 1)
    weights[at] = index.weights[own].unsqueeze(2)
    flat = queries.view(-1, width)
    scores = [
        torch.mm(flat, tile.T).relu_().view(size, heads, KEYS).mul_(weights).sum(1)
        for tile in keys[: positions // KEYS]
    ]
    return torch.cat(scores, dim=1).masked_fill_(~seen, float("-inf"))


def _attend(tile: Tensor, history: Tensor, seen: Tensor, rank: int, scale: float) -> Tensor:
    """[size, H, R] for queries [size, H, W]; two passes, so that sums need no running rescale."""
    size, heads, width = tile.shape
    rows = tile.view(-1, width)
    hidden = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))
    masks = hidden.view(size, -1, KEYS).unbind(1)
    scores = []
    for mask, keys in zip(masks, history, strict=False):
        part = torch.mm(rows, keys.T).mul_(scale)
        part.view(size, heads, KEYS).add_(mask.unsqueeze(1))
        scores.append(part)
    best = scores[0].amax(-1, keepdim=True)
    for part in scores[1:]:
        best = torch.maximum(best, part.amax(-1, keepdim=True))
    total, mixed = torch.zeros_like(best), rows.new_zeros(len(rows), rank)
    for part, keys in zip(scores, history, strict=False):
        weights = part.sub_(best).exp_()
        total.add_(weights.sum(-1, keepdim=True))
        mixed.add_(torch.mm(weights, keys[:, :rank]))
    return mixed.div_(total).view(size, heads, rank)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See kernels.latent.LatentKernels.layer_norm."""
    out = torch.empty_like(x)
    for at in range(0, x.shape[0], ROWS):
        rows = x[at : at + ROWS]
        tile = whole_tile(rows)
        tile.sub_(tile.mean(-1, keepdim=True))
        scale = tile.square().mean(-1, keepdim=True).add_(eps).sqrt_().reciprocal_()
        out[at : at + ROWS] = tile.mul_(scale).mul_(weight).add_(bias)[: rows.shape[0]]
    return out


LATENT = LatentKernels(pack_heads=TiledHeads, attention=attention, layer_norm=layer_norm)
