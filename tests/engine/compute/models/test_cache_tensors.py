"""The declaration of a KV cache: its size and its name."""

import torch

from services.engine.compute.models.cache_tensors import (
    CacheTensor,
    block_bytes,
    keys_and_values,
    layout_name,
)
from services.engine.contract.model_config import ModelConfig

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=8,
    hidden_size=48,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=96,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    max_position=64,
    tie_embeddings=True,
)


def test_keys_and_values_of_every_layer() -> None:
    tensors = keys_and_values(CONFIG, torch.bfloat16)
    assert [tensor.layer for tensor in tensors] == [0, 1]
    assert block_bytes(tensors, 16) == 2 * 16 * 4 * 8 * 2  # layers, rows, 2 G, D, bfloat16
    # Part of the name under which other engines find the blocks: it must not change.
    assert layout_name(tensors) == "paged/2x4x8/bfloat16"


def test_tensors_of_several_kinds_and_formats() -> None:
    tensors = (
        CacheTensor(0, "latent", (24,), torch.float32),
        CacheTensor(0, "index", (8,), torch.bfloat16),
        CacheTensor(1, "latent", (24,), torch.float32),
        CacheTensor(1, "latent_two", (6,), torch.int8),
    )
    assert block_bytes(tensors, 4) == 4 * (24 * 4 + 8 * 2 + 24 * 4 + 6)
    assert layout_name(tensors) == ("paged/1xindex8/bfloat16+2xlatent24/float32+1xlatent_two6/int8")
    other = layout_name((*tensors[1:], CacheTensor(0, "latent", (25,), torch.float32)))
    assert other != layout_name(tensors)
