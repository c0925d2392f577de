"""Sampling written with plain Python integers: the oracle for the noise of every other set."""

import math

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def sample(scores: Tensor, keys: Tensor) -> Tensor:
    """See kernels.interface.Kernels.sample; the lowest id wins a tie."""
    drawn = []
    for row, (first, second) in zip(scores.tolist(), keys.tolist(), strict=True):
        noisy = [score + noise(first, second, index) for index, score in enumerate(row)]
        drawn.append(noisy.index(max(noisy)))
    return torch.tensor(drawn, device=scores.device)


def arg_max(scores: Tensor) -> Tensor:
    """See kernels.interface.Kernels.arg_max."""
    ids = []
    for row in scores.tolist():
        undefined = [index for index, score in enumerate(row) if math.isnan(score)]
        ids.append(undefined[0] if undefined else row.index(max(row)))
    return torch.tensor(ids, dtype=torch.long, device=scores.device)


def noise(first: int, second: int, index: int) -> float:
    """Gumbel noise of token id `index` for the key (first, second) of a row."""
    word = _mix(_mix(index * 0x9E3779B9 + first & _WORD) ^ second & _WORD) & 0x7FFFFFFF
    v = min((word + 0.5) * 2.0**-31, 1 - 2**-24)
    return -math.log(-math.log1p(-v))


def _mix(x: int) -> int:
    x = (x ^ x >> 16) * 0x21F0AAAD & _WORD
    x = (x ^ x >> 15) * 0xD35A2D97 & _WORD
    return x ^ x >> 15
