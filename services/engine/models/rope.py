"""Angles of rotary embeddings, with Llama 3's stretch of the low frequencies."""

import math

import torch
from torch import Tensor

from services.engine.models.config import ModelConfig, RopeScaling


def turn_table(config: ModelConfig, num_positions: int) -> Tensor:
    """[positions, head_dim / 2, 2] float32: cosine and sine of each pair's angle."""
    dim = config.head_dim
    powers = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    frequencies = 1.0 / (config.rope_theta**powers)
    if config.rope_scaling:
        frequencies = _stretched(frequencies, config.rope_scaling)
    angles = torch.arange(num_positions).float().unsqueeze(1) * frequencies
    return torch.stack((angles.cos(), angles.sin()), dim=-1)


def _stretched(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between interpolated.

    Source: the Llama 3.1 model card's `apply_scaling`.
    """
    waves = 2 * math.pi / frequencies
    longest = scaling.original_max_position / scaling.low_freq_factor
    shortest = scaling.original_max_position / scaling.high_freq_factor
    span = scaling.high_freq_factor - scaling.low_freq_factor
    share = (scaling.original_max_position / waves - scaling.low_freq_factor) / span
    between = (1 - share) * frequencies / scaling.factor + share * frequencies
    slow = torch.where(waves > longest, frequencies / scaling.factor, between)
    return torch.where(waves < shortest, frequencies, slow)


def pair_halves(weight: Tensor, heads: int) -> Tensor:
    """Reorder projection rows [heads * D, in] so that rotated pairs are neighbours.

    Scores do not change, since queries and keys are reordered alike.
    """
    halves = weight.view(heads, 2, -1, weight.shape[1])
    return halves.transpose(1, 2).reshape(weight.shape)
