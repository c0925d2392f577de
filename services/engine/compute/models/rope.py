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


def cos_sin_table(config: ModelConfig, num_positions: int) -> Tensor:
    """Cosine and sine of each pair's angle: [positions, head_dim / 2, 2] float32.

    Source: Su et al. 2021, equation 34.

    Raises:
        ModelFileError: the file does not have one frequency factor per pair.
    """
    dim = config.head_dim
    powers = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    frequencies = 1.0 / (config.rope_theta**powers)
    scale = 1.0
    if config.rope_scaling:
        frequencies = _scaled(frequencies, config.rope_scaling, config.rope_theta)
    if isinstance(config.rope_scaling, YarnRope):
        scale = config.rope_scaling.attention_factor
    angles = torch.arange(num_positions).float().unsqueeze(1) * frequencies
    return torch.stack((angles.cos() * scale, angles.sin() * scale), dim=-1)


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


def pair_halves(weight: Tensor, heads: int) -> Tensor:
    """Reorder projection rows [heads * D, in] so that rotated pairs are adjacent.

    Scores stay the same, since queries and keys are reordered alike.
    """
    halves = weight.view(heads, 2, -1, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)
