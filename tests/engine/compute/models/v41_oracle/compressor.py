"""Compressed entries (CSA2): one latent for each group of `ratio` positions, no overlap."""

import torch
from torch import Tensor

from tests.engine.compute.models.v41_oracle import formats
from tests.engine.compute.models.v41_oracle.shape import Shape
from tests.engine.compute.models.v41_oracle.weights import Weights


def pooled(values: Tensor, gates: Tensor | None) -> Tensor:
    """[G, d] of values and gate logits [G, ratio, d]: a softmax over the group, per channel."""
    if gates is None:
        return values.sum(1)
    return (gates.softmax(1) * values).sum(1)


def latents(shape: Shape, weights: Weights, layer: int, rows: Tensor) -> Tensor:
    """[G, d] before rotation, of rows [G, ratio, D]: whole groups only."""
    at = f"layers.{layer}.attn.compressor"
    values = rows @ weights[f"{at}.wkv.weight"].T
    gate = weights.get(f"{at}.wgate.weight")
    gates = None if gate is None else rows @ gate.T
    return formats.normed(pooled(values, gates), shape.rms_norm_eps, weights[f"{at}.norm.weight"])


def entries(shape: Shape, latent: Tensor, starts: Tensor) -> Tensor:
    """[G, d]: key and value of each group, turned by its first position."""
    table = formats.compress_frequencies(shape)
    return formats.entry_values(formats.rotated(latent, starts, table))


def index_keys(
    shape: Shape, weights: Weights, layer: int, latent: Tensor, starts: Tensor
) -> Tensor:
    """[G, index d], from the latent before its rotation."""
    at = f"layers.{layer}.attn.indexer"
    keys = formats.normed(
        latent @ weights[f"{at}.wk.weight"].T,
        shape.rms_norm_eps,
        weights[f"{at}.k_norm.weight"],
    )
    return formats.index_values(formats.rotated(keys, starts, formats.compress_frequencies(shape)))


def visible(positions: Tensor, ratio: int, count: int) -> Tensor:
    """[T, G] bool: a group is visible to its own last position and to all later ones."""
    return torch.arange(count)[None] < ((positions + 1) // ratio)[:, None]
