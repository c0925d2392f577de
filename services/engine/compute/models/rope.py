"""Angles of rotary embeddings, and the scalings that extend them to longer sequences."""

import math

import torch
from torch import Tensor

from services.engine.contract.model_config import (
    FactorsRope,
    LinearRope,
    Llama3Rope,
    ModelConfig,
    ModelFileError,
    RopeScaling,
    YarnRope,
)

_RAMP_WIDTH = 0.001
"""Width of a ramp whose ends coincide, so that nothing is divided by 0."""


def cos_sin_table(config: ModelConfig, num_positions: int, *, sliding: bool = False) -> Tensor:
    """Cosine and sine of each pair's angle: [positions, head_dim / 2, 2] float32.

    Pairs beyond `ModelConfig.rotary_dim` are not rotated. Source: Su et al. 2021, equation 34.

    Args:
        sliding: for layers with the sliding window, where they have frequencies of their own.

    Raises:
        ModelFileError: the file does not have one frequency factor per pair.
    """
    dim = config.rotary_dim or config.head_dim
    theta, scaling = config.rope_theta, config.rope_scaling
    if sliding and config.sliding_rope_theta is not None:
        theta, scaling = config.sliding_rope_theta, None
    powers = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    frequencies = 1.0 / (theta**powers)
    scale = 1.0
    if scaling:
        frequencies = _scaled(frequencies, scaling, theta)
    if isinstance(scaling, YarnRope | FactorsRope):
        scale = scaling.attention_factor
    angles = torch.arange(num_positions).float().unsqueeze(1) * frequencies
    table = torch.stack((angles.cos() * scale, angles.sin() * scale), dim=-1)
    if dim == config.head_dim:
        return table
    still = torch.tensor((1.0, 0.0)).expand(num_positions, (config.head_dim - dim) // 2, 2)
    return torch.cat((table, still), dim=1)


def _scaled(frequencies: Tensor, scaling: RopeScaling, theta: float) -> Tensor:
    match scaling:
        case LinearRope(factor=factor):
            return frequencies / factor
        case Llama3Rope():
            return _stretched(frequencies, scaling)
        case YarnRope():
            return _ramped(frequencies, scaling, theta)
        case FactorsRope(factors=factors):
            if len(factors) != len(frequencies):
                raise ModelFileError(
                    f"rope_freqs.weight has {len(factors)} factors, but a head has "
                    f"{len(frequencies)} rotary pairs"
                )
            return frequencies / torch.tensor(factors)


def _stretched(frequencies: Tensor, scaling: Llama3Rope) -> Tensor:
    """Divide low frequencies by `factor`, keep high ones, and interpolate those between.

    Source: `apply_scaling` in the Llama 3.1 model card.
    """
    waves = 2 * math.pi / frequencies
    longest = scaling.original_max_position / scaling.low_freq_factor
    shortest = scaling.original_max_position / scaling.high_freq_factor
    span = scaling.high_freq_factor - scaling.low_freq_factor
    share = (scaling.original_max_position / waves - scaling.low_freq_factor) / span
    between = (1 - share) * frequencies / scaling.factor + share * frequencies
    slow = torch.where(waves > longest, frequencies / scaling.factor, between)
    return torch.where(waves < shortest, frequencies, slow)


def _ramped(frequencies: Tensor, scaling: YarnRope, theta: float) -> Tensor:
    """YaRN: the share of the scaling grows with the pair. Peng et al. 2023, equations 17 to 20."""
    pairs = len(frequencies)

    def pair_of(rotations: float) -> float:
        """The pair that makes this many rotations within the original length."""
        longest = scaling.original_max_position / (rotations * 2 * math.pi)
        return pairs * math.log(longest) / math.log(theta)

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    width = last - first or _RAMP_WIDTH
    share = ((torch.arange(pairs).float() - first) / width).clamp_(0, 1)
    return frequencies / scaling.factor * share + frequencies * (1 - share)


def pair_halves(weight: Tensor, heads: int, rotary: int = 0) -> Tensor:
    """Reorder projection rows [heads * D, in] so that rotated pairs are adjacent.

    Scores stay the same, since queries and keys are reordered alike.

    Args:
        rotary: the first rows of a head, which are rotated; 0: all of them.
    """
    if rotary:
        rows = weight.view(heads, -1, weight.shape[1])
        turned = pair_halves(rows[:, :rotary].reshape(-1, weight.shape[1]), heads)
        parts = (turned.view(heads, rotary, -1), rows[:, rotary:])
        return torch.cat(parts, dim=1).view(weight.shape)
    halves = weight.view(heads, 2, -1, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)
