"""The draw in plain integers: an oracle for the noise of every other set."""

import math

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def sample(scores: Tensor, keys: Tensor) -> Tensor:
    """The id with the highest score plus Gumbel noise, lowest id on ties."""
    drawn = []
    for row, (first, second) in zip(scores.tolist(), keys.tolist(), strict=True):
        noisy = [score + noise(first, second, index) for index, score in enumerate(row)]
        drawn.append(noisy.index(max(noisy)))
    return torch.tensor(drawn, device=scores.device)


def noise(first: int, second: int, index: int) -> float:
    """Gumbel noise of one token id under a row's key."""
    word = _mix(_mix(index * 0x9E3779B9 + first & _WORD) ^ second & _WORD) & 0x7FFFFFFF
    v = min((word + 0.5) * 2.0**-31, 1 - 2**-24)
    return -math.log(-math.log1p(-v))


def _mix(x: int) -> int:
    x = (x ^ x >> 16) * 0x21F0AAAD & _WORD
    x = (x ^ x >> 15) * 0xD35A2D97 & _WORD
    return x ^ x >> 15
