"""One layer's attention: the window and the chosen compressed entries under one softmax."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.engine.compute.models.v41_oracle import formats
from tests.engine.compute.models.v41_oracle.shape import Shape
from tests.engine.compute.models.v41_oracle.weights import Weights


@dataclass(frozen=True)
class Seen:
    """The compressed entries of a layer and which of them each row attends to."""

    entries: Tensor
    """[G, d]"""
    chosen: Tensor
    """[T, G] bool"""


def query_latent(shape: Shape, weights: Weights, layer: int, x: Tensor) -> Tensor:
    """[T, q_lora]"""
    at = f"layers.{layer}.attn"
    return formats.normed(
        x @ weights[f"{at}.wq_a.weight"].T, shape.rms_norm_eps, weights[f"{at}.q_norm.weight"]
    )


def queries(
    shape: Shape, weights: Weights, layer: int, latent: Tensor, positions: Tensor
) -> Tensor:
    """[T, H, d], rotated. No norm per head: V4 has one, V4.1 does not."""
    flat = latent @ weights[f"layers.{layer}.attn.wq_b.weight"].T
    heads = flat.unflatten(-1, (shape.num_attention_heads, shape.head_dim))
    table = formats.frequencies(shape, shape.compress_ratios[layer])
    return formats.rotated(heads, positions, table)


def window_keys(shape: Shape, weights: Weights, layer: int, x: Tensor, positions: Tensor) -> Tensor:
    """[T, d]: one vector for each row, key and value of all heads."""
    at = f"layers.{layer}.attn"
    keys = formats.normed(
        x @ weights[f"{at}.wkv.weight"].T, shape.rms_norm_eps, weights[f"{at}.kv_norm.weight"]
    )
    table = formats.frequencies(shape, shape.compress_ratios[layer])
    return formats.window_values(formats.rotated(keys, positions, table))


def in_window(positions: Tensor, key_positions: Tensor, window: int) -> Tensor:
    """[T, keys] bool: the row itself and the window - 1 before it."""
    back = positions[:, None] - key_positions[None]
    return (back >= 0) & (back < window)


def probabilities(logits: Tensor, seen: Tensor, sinks: Tensor) -> Tensor:
    """[H, T, keys]: a softmax whose denominator has one more term for each head, the sink."""
    hidden = logits.masked_fill(~seen[None], float("-inf"))
    sink = sinks[:, None, None].expand(-1, logits.shape[1], 1)
    return torch.cat([hidden, sink], -1).softmax(-1)[..., :-1]


def projected(shape: Shape, weights: Weights, layer: int, heads: Tensor) -> Tensor:
    """[T, D] of heads [T, H, d]: groups of heads each have a first projection of their own."""
    at = f"layers.{layer}.attn"
    groups = heads.flatten(1).unflatten(-1, (shape.o_groups, -1))
    first = weights[f"{at}.wo_a.weight"].unflatten(0, (shape.o_groups, shape.o_lora_rank))
    return torch.einsum("tgi,goi->tgo", groups, first).flatten(1) @ weights[f"{at}.wo_b.weight"].T


def attended(
    shape: Shape,
    weights: Weights,
    layer: int,
    query: Tensor,
    positions: Tensor,
    window: tuple[Tensor, Tensor],
    compressed: Seen | None,
) -> Tensor:
    """[T, D] of queries [T, H, d].

    Args:
        window: positions [keys] and keys [keys, d] of all rows that the layer still holds.
    """
    key_positions, keys = window
    seen = in_window(positions, key_positions, shape.sliding_window)
    if compressed is not None:
        keys = torch.cat([keys, compressed.entries])
        seen = torch.cat([seen, compressed.chosen], 1)
    logits = torch.einsum("thd,sd->hts", query, keys) * shape.head_dim**-0.5
    share = probabilities(logits, seen, weights[f"layers.{layer}.attn.attn_sink"])
    output = torch.einsum("hts,sd->thd", share, keys)
    table = formats.frequencies(shape, shape.compress_ratios[layer])
    return projected(shape, weights, layer, formats.rotated(output, positions, table, sign=-1))
