"""Rotation of the trailing elements of heads, and its inverse.

Layers of kind "window" have plain angles. All others have a larger base and YaRN's frequencies,
for queries, keys, compressed entries and the indexer alike.
"""

import math

import torch
from torch import Tensor

from services.engine.contract.deepseek_v4 import DeepseekSizes
from services.engine.contract.model_config import YarnRope


def angles(config: DeepseekSizes, num_positions: int, *, compressed: bool) -> Tensor:
    """Cosine and sine of each pair's angle: [positions, rope_dim / 2, 2] float32.

    Source: Su et al. 2021, equation 34.

    Args:
        compressed: for layers with compressed entries.
    """
    theta = config.compress_rope_theta if compressed else config.rope_theta
    powers = torch.arange(0, config.rope_dim, 2, dtype=torch.int64).float() / config.rope_dim
    frequencies = 1.0 / (theta**powers)
    if compressed and config.compress_rope:
        frequencies = _stretched(frequencies, config.compress_rope, theta)
    turned = torch.arange(num_positions).float().unsqueeze(1) * frequencies
    return torch.stack((turned.cos(), turned.sin()), dim=-1)


def rotate(x: Tensor, cos_sin: Tensor, *, back: bool = False) -> None:
    """Rotate the trailing elements of x [T, ..., D] in place by the angles of their rows.

    Elements (2i, 2i + 1) of the trailing part form a pair.

    Args:
        cos_sin: [T, rope_dim / 2, 2].
        back: by the negative angles.
    """
    size = 2 * cos_sin.shape[1]
    shape = (len(x), *(1,) * (x.dim() - 2), cos_sin.shape[1])
    cos, sin = cos_sin[..., 0].reshape(shape), cos_sin[..., 1].reshape(shape)
    if back:
        sin = -sin
    even, odd = x[..., -size::2], x[..., 1 - size :: 2]
    turned = even * cos - odd * sin
    odd.copy_(even * sin + odd * cos)
    even.copy_(turned)


def _stretched(frequencies: Tensor, scaling: YarnRope, theta: float) -> Tensor:
    """YaRN: the share of the scaling grows with the pair. Peng et al. 2023, equations 17 to 20.

    DeepSeek V4 does not scale the scores (equation 22).
    """
    pairs = len(frequencies)

    def pair_of(rotations: float) -> float:
        """The pair that makes this many rotations within the original length."""
        longest = scaling.original_max_position / (rotations * 2 * math.pi)
        return pairs * math.log(longest) / math.log(theta)

    first = max(math.floor(pair_of(scaling.beta_fast)), 0)
    last = min(math.ceil(pair_of(scaling.beta_slow)), 2 * pairs - 1)
    share = ((torch.arange(pairs).float() - first) / (last - first or 0.001)).clamp_(0, 1)
    return frequencies / scaling.factor * share + frequencies * (1 - share)
