"""Paged attention over tiles aligned to absolute positions.

A query at position p is always row p mod Q of its tile, and attends to the keys 0 .. p in tiles of
KEYS, added in order. There are two passes: the maximum of all scores is exact in any order, so the
sums need no running rescale, whose exponentials would depend on the row's place in the batch.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from kernels.interface import AttentionGroup
from kernels.torch.whole_vectors import SERIAL

KEYS = 128
"""Positions of a tile of keys."""
_MAX_QUERIES = 16
"""Positions of a tile of queries, at most."""


def attention(q: Tensor, kv: Tensor, cache: Tensor, group: AttentionGroup) -> Tensor:
    """See kernels.interface.Kernels.attention; all keys and values are read from the cache."""
    return _attention(q, kv, cache, group, None)


def sink_attention(
    q: Tensor, kv: Tensor, cache: Tensor, group: AttentionGroup, sinks: Tensor
) -> Tensor:
    """See kernels.interface.Kernels.sink_attention."""
    return _attention(q, kv, cache, group, sinks.float())


def _attention(
    q: Tensor, kv: Tensor, cache: Tensor, group: AttentionGroup, sinks: Tensor | None
) -> Tensor:
    rows, heads, dim = q.shape
    each = rows // len(group.starts)
    out = torch.empty(rows, heads, dim, dtype=q.dtype)
    for index, start in enumerate(group.starts):
        keys, values = _history(cache, group.block_tables[index], start + each)
        own = slice(index * each, (index + 1) * each)
        _sequence(q[own], keys, values, start, group.window, sinks, out[own])
    return out.flatten(1)


def _history(cache: Tensor, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values, each [tiles, G, KEYS, D]; positions from `length` on must be masked."""
    block_size, kv_rows, dim = cache.shape[1:]
    tiles = -(-length // KEYS)
    blocks = -(-tiles * KEYS // block_size)
    known = table[:blocks]
    padded = functional.pad(known, (0, blocks - known.shape[0]))
    flat = cache.index_select(0, padded).view(-1, kv_rows, dim)[: tiles * KEYS]
    parts = flat.view(tiles, KEYS, 2, kv_rows // 2, dim).permute(2, 0, 3, 1, 4).contiguous()
    return parts[0], parts[1]


def _sequence(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    start: int,
    window: int,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    length, heads, dim = q.shape
    size = queries_per_tile(heads)
    kv_heads = keys.shape[1]
    own = None
    if sinks is not None:  # [G, heads of a group * size, 1], like the rows of a tile
        own = sinks.view(kv_heads, -1, 1).expand(-1, -1, size).reshape(kv_heads, -1, 1)
    end = start + length
    for first in range(start // size * size, end, size):
        low, high = max(first, start), min(first + size, end)
        tile = q.new_zeros(size, heads, dim)
        tile[low - first : high - first] = q[low - start : high - start]
        # [G, heads of a group * size, D]: all rows that attend to the same keys.
        rows = tile.view(size, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
        done = _tile(rows, keys, values, first, size, window, own)
        done = done.view(kv_heads, -1, size, dim).permute(2, 0, 1, 3).reshape(size, heads, dim)
        out[low - start : high - start] = done[low - first : high - first]


def queries_per_tile(heads: int) -> int:
    """Positions of a query tile: a power of two, so small that PyTorch splits no call."""
    size = _MAX_QUERIES
    while size > 1 and size * heads * KEYS > SERIAL:
        size //= 2
    return size


def _tile(
    rows: Tensor,
    keys: Tensor,
    values: Tensor,
    first: int,
    size: int,
    window: int,
    sinks: Tensor | None,
) -> Tensor:
    last = (first + size - 1) // KEYS
    oldest = max(0, first - window + 1) // KEYS if window else 0
    tiles = range(oldest, last + 1)
    scale = 1 / math.sqrt(rows.shape[-1])
    scores = [torch.bmm(rows, keys[index].transpose(1, 2)).mul_(scale) for index in tiles]
    for index, part in zip(tiles, scores, strict=True):
        if index == last or window:
            part.view(rows.shape[0], -1, size, KEYS).add_(_mask(first, size, index, window))
    best = scores[0].amax(-1, keepdim=True)
    for part in scores[1:]:
        best = torch.maximum(best, part.amax(-1, keepdim=True))
    if sinks is not None:
        best = torch.maximum(best, sinks)
    total = torch.zeros_like(best) if sinks is None else (sinks - best).exp_()
    mixed = torch.zeros_like(rows)
    for part, value in zip(scores, values[oldest:], strict=False):
        weights = part.sub_(best).exp_()
        total.add_(weights.sum(-1, keepdim=True))
        mixed.add_(torch.bmm(weights, value))
    return mixed.div_(total)


def _mask(first: int, size: int, tile: int, window: int) -> Tensor:
    """[size, KEYS]: -inf where the query does not attend to the key, else 0."""
    queries = torch.arange(first, first + size).unsqueeze(1)
    positions = torch.arange(tile * KEYS, (tile + 1) * KEYS)
    hidden = positions > queries
    if window:
        hidden |= positions <= queries - window
    return torch.zeros(size, KEYS).masked_fill_(hidden, float("-inf"))
