"""Names and sizes of the weights as published, and random ones that are equal on every machine."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from tests.engine.compute.models.v41_oracle.shape import Shape

Weights = Mapping[str, Tensor]
"""By published name, already dequantised."""


def sizes(shape: Shape, engram_rows: Mapping[int, int]) -> dict[str, tuple[int, ...]]:
    """Every tensor of the text model; `engram_rows` by layer."""
    hidden, vocab = shape.hidden_size, shape.vocab_size
    found: dict[str, tuple[int, ...]] = {
        "embed.weight": (vocab, hidden),
        "head.weight": (vocab, hidden),
        "norm.weight": (hidden,),
    }
    for layer in range(shape.num_hidden_layers):
        at = f"layers.{layer}"
        found |= _attention(shape, layer, f"{at}.attn") | _experts(shape, f"{at}.ffn")
        for site in ("attn", "ffn"):
            found[f"{at}.{site}_norm.weight"] = (hidden,)
            found |= _mix(shape.hc_mult, hidden, f"{at}.hc_{site}")
        if layer in engram_rows:
            found |= _engram(shape, f"{at}.engram", engram_rows[layer])
    return found


def _attention(shape: Shape, layer: int, at: str) -> dict[str, tuple[int, ...]]:
    hidden, width, latent = shape.hidden_size, shape.head_dim, shape.q_lora_rank
    wide = shape.num_attention_heads * width
    low = shape.o_groups * shape.o_lora_rank
    found: dict[str, tuple[int, ...]] = {
        f"{at}.wq_a.weight": (latent, hidden),
        f"{at}.q_norm.weight": (latent,),
        f"{at}.wq_b.weight": (wide, latent),
        f"{at}.wkv.weight": (width, hidden),
        f"{at}.kv_norm.weight": (width,),
        f"{at}.attn_sink": (shape.num_attention_heads,),
        f"{at}.wo_a.weight": (low, wide // shape.o_groups),
        f"{at}.wo_b.weight": (hidden, low),
    }
    if layer in shape.kv_source_layer_ids:
        found[f"{at}.compressor.wkv.weight"] = (width, hidden)
        if shape.compress_ratios[layer] > 1:
            found[f"{at}.compressor.wgate.weight"] = (width, hidden)
        found[f"{at}.compressor.norm.weight"] = (width,)
        found[f"{at}.indexer.wk.weight"] = (shape.index_head_dim, width)
        found[f"{at}.indexer.k_norm.weight"] = (shape.index_head_dim,)
    if layer in shape.index_source_layer_ids:
        heads = shape.index_n_heads
        found[f"{at}.indexer.wq_b.weight"] = (heads * shape.index_head_dim, latent)
        found[f"{at}.indexer.weights_proj.weight"] = (heads, hidden)
    return found


def _experts(shape: Shape, at: str) -> dict[str, tuple[int, ...]]:
    hidden, middle, many = shape.hidden_size, shape.moe_intermediate_size, shape.n_routed_experts
    found: dict[str, tuple[int, ...]] = {
        f"{at}.gate.weight": (many, hidden),
        f"{at}.gate.bias": (many,),
        f"{at}.gate.bias_vl": (many,),
    }
    for expert in [*(f"experts.{number}" for number in range(many)), "shared_experts"]:
        found[f"{at}.{expert}.w1.weight"] = (middle, hidden)
        found[f"{at}.{expert}.w3.weight"] = (middle, hidden)
        found[f"{at}.{expert}.w2.weight"] = (hidden, middle)
    return found


def _mix(many: int, hidden: int, at: str) -> dict[str, tuple[int, ...]]:
    rows = many * (many + 2)
    return {f"{at}_fn": (rows, many * hidden), f"{at}_base": (rows,), f"{at}_scale": (3,)}


def _engram(shape: Shape, at: str, rows: int) -> dict[str, tuple[int, ...]]:
    grams = shape.engram_max_ngram_size - 1
    wide = grams * shape.engram_n_heads * shape.engram_head_dim
    many, hidden = shape.hc_mult, shape.hidden_size
    return {
        f"{at}.embed.weight": (rows, shape.engram_head_dim),
        f"{at}.wkv.weight": ((many + 1) * hidden, wide),
        f"{at}.q_weight": (many, hidden),
        f"{at}.k_weight": (many, hidden),
    }


def random_weights(
    shape: Shape, engram_rows: Mapping[int, int], seed: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Weights that make every part of the model count; equal values in every dtype (24 bits)."""
    return {
        name: torch.from_numpy(_spread(name, size, 1000 * seed + order)).to(dtype)
        for order, (name, size) in enumerate(sizes(shape, engram_rows).items())
    }


def _spread(name: str, size: tuple[int, ...], key: int) -> np.ndarray:
    drawn = uniform(size, key)
    if name.endswith(("norm.weight", "q_weight", "k_weight")):
        return 1 + drawn / 4
    if len(size) == 1:
        return drawn
    if ".engram.embed" in name or name.startswith("embed"):
        return drawn
    return drawn * np.float32(1.7 / size[1] ** 0.5)


def uniform(size: tuple[int, ...], key: int) -> np.ndarray:
    """float32 values in [-1, 1) with 24 bits, by SplitMix64 over the index."""
    with np.errstate(over="ignore"):
        state = np.arange(int(np.prod(size)), dtype=np.uint64) + np.uint64(key << 32)
        state = (state + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ state >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ state >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    top = (state >> np.uint64(40)).astype(np.float32)
    return (top / np.float32(1 << 23) - np.float32(1)).reshape(size)
