"""Paged attention by its definition: gather, scores, softmax, weighted sum."""

import math

import torch
from torch import Tensor

from kernels.interface import AttentionGroup


def kv_write(cache: Tensor, kv: Tensor, slots: Tensor) -> None:
    """See kernels.interface.Kernels.kv_write."""
    block_size = cache.shape[1]
    for row, slot in enumerate(slots.tolist()):
        cache[slot // block_size, slot % block_size] = kv[row]


def attention(q: Tensor, kv: Tensor, cache: Tensor, group: AttentionGroup) -> Tensor:
    """softmax(q k^T / sqrt(D)) v for each row and head; keys and values are read from the cache.

    Causality and the sliding window are computed from positions; `group.mask` is ignored.
    """
    return sink_attention(q, kv, cache, group, torch.full((q.shape[1],), float("-inf")))


def sink_attention(
    q: Tensor, kv: Tensor, cache: Tensor, group: AttentionGroup, sinks: Tensor
) -> Tensor:
    """See kernels.interface.Kernels.sink_attention; see `attention`."""
    rows, heads, dim = q.shape
    kv_heads = kv.shape[1] // 2
    rows_each = rows // len(group.starts)
    out = torch.empty(rows, heads, dim, dtype=q.dtype, device=q.device)
    for index, start in enumerate(group.starts):
        history = cache[group.block_tables[index]].flatten(0, 1)
        for step in range(rows_each):
            row = index * rows_each + step
            end = start + step + 1
            visible = history[max(0, end - group.window) if group.window else 0 : end].float()
            for head in range(heads):
                shared = head // (heads // kv_heads)
                scores = visible[:, shared] @ q[row, head].float() / math.sqrt(dim)
                every = torch.cat((scores, sinks[head : head + 1].float()))
                out[row, head] = every.softmax(-1)[:-1] @ visible[:, kv_heads + shared]
    return out.flatten(1)
