"""Norms, rotation and the quantisers that the model was trained with."""

import math

import torch
from torch import Tensor

from tests.engine.compute.models.v41_oracle.shape import Shape

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_SMALLEST = 2.0**-126
"""Floor of a power-of-two scale, so that a block of zeros has one."""


def normed(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """Root-mean-square norm over the last dimension."""
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def main_frequencies(shape: Shape) -> Tensor:
    """[rope/2] float64: of layers with the window alone."""
    steps = torch.arange(0, shape.qk_rope_head_dim, 2, dtype=torch.float64)
    return shape.rope_theta ** (-steps / shape.qk_rope_head_dim)


def compress_frequencies(shape: Shape) -> Tensor:
    """[rope/2] float64: of every layer with compressed entries, YaRN, no attention factor."""
    width, theta = shape.qk_rope_head_dim, shape.compress_rope_theta
    plain = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)

    def turn(beta: float) -> float:
        full = shape.rope_original_positions / (2 * math.pi * beta)
        return width * math.log(full) / (2 * math.log(theta))

    low = max(math.floor(turn(shape.rope_beta_fast)), 0)
    high = min(math.ceil(turn(shape.rope_beta_slow)), width - 1)
    index = torch.arange(width // 2, dtype=torch.float64)
    ramp = ((index - low) / max(high - low, 0.001)).clamp(0, 1)
    return ramp * plain / shape.rope_factor + (1 - ramp) * plain


def frequencies(shape: Shape, ratio: int) -> Tensor:
    """[rope/2] float64: of a layer by its compression ratio."""
    return compress_frequencies(shape) if ratio else main_frequencies(shape)


def rotated(x: Tensor, positions: Tensor, table: Tensor, sign: int = 1) -> Tensor:
    """Turn the trailing dimensions of x [T, ..., d], adjacent pairs, by position * frequency."""
    angles = positions.to(torch.float64)[:, None] * table
    while angles.dim() < x.dim():
        angles = angles.unsqueeze(1)
    cos, sin = angles.cos().to(x.dtype), sign * angles.sin().to(x.dtype)
    rope = 2 * len(table)
    still, moved = x[..., :-rope], x[..., -rope:]
    even, odd = moved[..., 0::2], moved[..., 1::2]
    pairs = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1)
    return torch.cat([still, pairs.flatten(-2)], -1)


def e4m3(x: Tensor) -> Tensor:
    """The nearest FP8 value (ties to even, +-448 at most)."""
    return x.clamp(-448, 448).float().to(torch.float8_e4m3fn).to(x.dtype)


def e2m1(x: Tensor) -> Tensor:
    """The nearest FP4 value, ties to the one with the even code; +-6 at most."""
    grid = torch.tensor(_E2M1, dtype=x.dtype)
    distance = (x.abs()[..., None] - grid).abs()
    # Even codes first: of two nearest values, argmin takes the one with the even code.
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    return grid[order][distance[..., order].argmin(-1)] * x.sign()


def power_of_two_scale(largest: Tensor, top: float) -> Tensor:
    """The smallest power of two that brings `largest` to `top` or below (ue8m0)."""
    return torch.exp2(torch.ceil(torch.log2(largest.clamp(min=_SMALLEST) / top)))


def window_values(x: Tensor) -> Tensor:
    """Window keys as FP8: all dimensions, per 32, ue8m0 scale, largest value 1e-4 at least."""
    return _by_block(
        x, 32, lambda largest: power_of_two_scale(largest.clamp(min=1e-4), 448.0), e4m3
    )


def entry_values(x: Tensor) -> Tensor:
    """Compressed entries as FP4, per 16, with FP8 scales."""
    return _by_block(x, 16, lambda largest: e4m3(largest.clamp(min=6 * 2.0**-9) / 6), e2m1)


def index_values(x: Tensor) -> Tensor:
    """Index queries and keys as FP4, per 32, with ue8m0 scales."""
    return _by_block(x, 32, lambda largest: power_of_two_scale(largest, 6.0), e2m1)


def _by_block(x: Tensor, size: int, scale_of, nearest) -> Tensor:  # type: ignore[no-untyped-def]
    """Quantise x block by block of its last dimension, which a quantiser must divide to act."""
    if x.shape[-1] % size:
        return x
    blocks = x.unflatten(-1, (-1, size))
    scale = scale_of(blocks.abs().amax(-1, keepdim=True))
    return (nearest(blocks / scale) * scale).flatten(-2)
