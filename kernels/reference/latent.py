"""Latent attention by its definition: one row and one head at a time."""

import torch
from torch import Tensor

from kernels.interface import AttentionGroup
from kernels.latent import IndexQuery, LatentKernels


class PlainHeads:
    """See kernels.latent.HeadLinear."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self.nbytes = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return torch.einsum("thi,hoi->tho", x, self._weight)


def attention(
    q: Tensor,
    cache: Tensor,
    group: AttentionGroup,
    rank: int,
    scale: float,
    index: IndexQuery | None,
) -> Tensor:
    """See kernels.latent.LatentKernels.attention; causality is computed from positions."""
    rows, heads, _ = q.shape
    each = rows // len(group.starts)
    out = torch.empty(rows, heads, rank, dtype=q.dtype, device=q.device)
    for row in range(rows):
        table = group.block_tables[row // each]
        end = group.starts[row // each] + row % each + 1
        history = cache[table].flatten(0, 1)[:end].float()
        if index is not None:
            keys = index.cache[table].flatten(0, 1)[:end].float()
            history = history[_choose(index, row, keys)]
        for head in range(heads):
            scores = history @ q[row, head].float() * scale
            out[row, head] = scores.softmax(-1) @ history[:, :rank]
    return out


def _choose(index: IndexQuery, row: int, keys: Tensor) -> list[int]:
    """Positions of the highest scores, ascending."""
    total = torch.zeros(len(keys))
    for weight, query in zip(index.weights[row], index.queries[row], strict=True):
        total += weight * torch.relu(keys @ query.float())
    ranked = sorted(range(len(keys)), key=lambda position: (-float(total[position]), position))
    return sorted(ranked[: index.top_k])


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See kernels.latent.LatentKernels.layer_norm."""
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    variance = centred.pow(2).mean(-1, keepdim=True)
    return (centred / (variance + eps).sqrt() * weight.float() + bias.float()).to(x.dtype)


LATENT = LatentKernels(pack_heads=PlainHeads, attention=attention, layer_norm=layer_norm)
