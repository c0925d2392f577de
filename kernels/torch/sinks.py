"""Paged attention with a learned score per head that joins the softmax and adds no value."""

import math

import torch
from torch import Tensor

from kernels.interface import AttentionGroup
from kernels.torch.attention import gather, kept_history

SCORES = 1 << 24
"""Scores of a prefill in memory at one time, at most, or those of one row if these are more."""


def sink_attention(
    q: Tensor, kv: Tensor, cache: Tensor, group: AttentionGroup, sinks: Tensor
) -> Tensor:
    """See kernels.interface.Kernels.sink_attention; `group.mask` is read for decodes only.

    PyTorch's attention operator knows no sinks: scores are in memory for one key head and SCORES
    of a prefill, with the mask of those rows, or for all heads of decodes.
    """
    if q.shape[0] == len(group.starts):
        return _decode(q, kv, cache, group, sinks)
    return _prefill(q, kv, cache, group, sinks)


def _decode(q: Tensor, kv: Tensor, cache: Tensor, group: AttentionGroup, sinks: Tensor) -> Tensor:
    batch, heads, dim = q.shape
    kv_heads = kv.shape[1] // 2
    if group.kept is not None:
        keys, values = kept_history(kv, cache, group, group.kept)
    else:
        history = gather(cache, group.block_tables).transpose(1, 2)
        keys, values = history[:, :kv_heads], history[:, kv_heads:]
    rows = q.view(batch, kv_heads, heads // kv_heads, dim)
    scores = rows @ keys.transpose(2, 3)
    own = sinks.view(1, kv_heads, -1, 1).expand(batch, -1, -1, 1)
    return (_weights(scores, group.mask, own, dim) @ values).reshape(batch, heads * dim)


def _prefill(q: Tensor, kv: Tensor, cache: Tensor, group: AttentionGroup, sinks: Tensor) -> Tensor:
    length, heads, dim = q.shape
    kv_heads = kv.shape[1] // 2
    if not group.causal:
        kv = gather(cache, group.block_tables)[0, : group.starts[0] + length]
    rows = q.transpose(0, 1).reshape(kv_heads, -1, length, dim)
    out = q.new_empty(kv_heads, heads // kv_heads, length, dim)
    at_once = max(1, SCORES // (rows.shape[1] * len(kv)))
    for at in range(0, length, at_once):
        part = slice(at, min(at + at_once, length))
        mask = _mask(group, part, len(kv), q)
        for head, own in enumerate(sinks.view(kv_heads, -1, 1, 1).unbind()):
            scores = rows[head, :, part] @ kv[:, head].T
            weights = _weights(scores, mask, own.expand(-1, scores.shape[1], 1), dim)
            out[head, :, part] = weights @ kv[:, kv_heads + head]
    return out.view(heads, length, dim).transpose(0, 1).reshape(length, heads * dim)


def _mask(group: AttentionGroup, part: slice, width: int, q: Tensor) -> Tensor:
    """[rows, width] in the format of q: -inf where a row of a prefill does not attend, else 0."""
    rows = torch.arange(part.start, part.stop, device=q.device).add_(group.starts[0]).unsqueeze(1)
    positions = torch.arange(width, device=q.device)
    hidden = positions > rows
    if group.window:
        hidden |= positions <= rows - group.window
    return q.new_zeros(hidden.shape).masked_fill_(hidden, float("-inf"))


def _weights(scores: Tensor, mask: Tensor | None, sinks: Tensor, dim: int) -> Tensor:
    """Softmax in float32 over the scores and the sink, without the sink's weight."""
    wide = scores.float().mul_(1 / math.sqrt(dim))
    if mask is not None:
        wide = wide + mask
    weights = torch.cat((wide, sinks.float()), dim=-1).softmax(-1)[..., :-1]
    return weights.to(scores.dtype)
