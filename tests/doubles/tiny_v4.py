"""A tiny random DeepSeek V4: its configuration, and its weights under their published names.

Weights come from the raw bits of a generator, so that every machine and version has equal ones, and
the expected logits that are committed stay right.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from services.engine.contract.deepseek_v4 import DeepseekV4Config
from services.engine.contract.model_config import ModelConfig
from services.engine.model_files.deepseek_v4 import deepseek_v4_config, v4_model_config
from services.engine.model_files.json_keys import Keys

SLIDING, SPARSE, HEAVY = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
KEYS: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "partial_rotary_factor": 0.25,
    "q_lora_rank": 16,
    "o_groups": 2,
    "o_lora_rank": 8,
    "sliding_window": 8,
    "index_n_heads": 16,
    "index_head_dim": 8,
    "index_topk": 3,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 1.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "layer_types": [SLIDING, SPARSE, HEAVY, SPARSE, HEAVY],
    "compress_rates": {SPARSE: 4, HEAVY: 8},
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe", "moe"],
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 512,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""config.json. The bound before SwiGLU is so low that it takes effect."""


def tiny_config(**changes: Any) -> DeepseekV4Config:
    """The configuration as the engine reads it, with some keys changed."""
    return deepseek_v4_config(Keys(KEYS | changes, "config.json"))


def tiny_model_config() -> ModelConfig:
    """The same as every model's configuration."""
    return v4_model_config(Keys(KEYS, "config.json"))


def tiny_weights() -> dict[str, torch.Tensor]:
    """All tensors by their published names."""
    return {name: torch.from_numpy(value) for name, value in _weights().items()}


def write_tiny_v4(folder: Path) -> Path:
    """Write config.json and model.safetensors, as published, and a tokenizer of single bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    _tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(KEYS, indent=1), encoding="utf-8")
    save_file(_weights(), folder / "model.safetensors", {"format": "pt"})
    return folder


def _tokenizer() -> Tokenizer:
    """Two special tokens, then the bytes from 33 on: as many ids as the model has."""
    vocab = {"<s>": 0, "<eot>": 1} | {chr(33 + number): 2 + number for number in range(94)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "<eot>"])
    return tokenizer


def _weights() -> dict[str, NDArray[Any]]:
    weights: dict[str, NDArray[Any]] = {}
    for name, size in _sizes().items():
        value = _uniform(size, zlib.crc32(name.encode()))
        if "norm" in name:
            value = 1 + value / 2
        elif name.endswith("attn_sink"):
            value = 2 * value
        elif len(size) > 1:
            value = value * (1.0 if name == "embed.weight" else 0.6)
        weights[name] = np.asarray(value, dtype=np.float32)
    table = (_uniform((96, 2), 7) * 4 + 4).astype(np.int64)
    table[:, 1] = (table[:, 0] + 1 + table[:, 1] % 7) % 8
    weights["layers.0.ffn.gate.tid2eid"] = table
    return weights


def _sizes() -> dict[str, tuple[int, ...]]:
    sizes: dict[str, tuple[int, ...]] = {
        "embed.weight": (96, 32),
        "head.weight": (96, 32),
        "norm.weight": (32,),
        **_site("hc_head", 4, 1),
    }
    for index, kind in enumerate(KEYS["layer_types"]):
        at = f"layers.{index}"
        sizes |= {f"{at}.attn_norm.weight": (32,), f"{at}.ffn_norm.weight": (32,)}
        sizes |= _site(f"{at}.hc_attn", 24, 3) | _site(f"{at}.hc_ffn", 24, 3)
        sizes |= _attention(f"{at}.attn")
        if kind == HEAVY:
            sizes |= _compressor(f"{at}.attn.compressor", 8, 16, 16)
        if kind == SPARSE:
            sizes |= _compressor(f"{at}.attn.compressor", 4, 32, 16)
            sizes |= _compressor(f"{at}.attn.indexer.compressor", 4, 16, 8)
            sizes[f"{at}.attn.indexer.wq_b.weight"] = (16 * 8, 16)
            sizes[f"{at}.attn.indexer.weights_proj.weight"] = (16, 32)
        sizes[f"{at}.ffn.gate.weight"] = (8, 32)
        if index:
            sizes[f"{at}.ffn.gate.bias"] = (8,)
        for part in ("shared_experts", *(f"experts.{expert}" for expert in range(8))):
            sizes[f"{at}.ffn.{part}.w1.weight"] = sizes[f"{at}.ffn.{part}.w3.weight"] = (16, 32)
            sizes[f"{at}.ffn.{part}.w2.weight"] = (32, 16)
    return sizes


def _site(at: str, outputs: int, parts: int) -> dict[str, tuple[int, ...]]:
    return {f"{at}_fn": (outputs, 4 * 32), f"{at}_base": (outputs,), f"{at}_scale": (parts,)}


def _attention(at: str) -> dict[str, tuple[int, ...]]:
    return {
        f"{at}.wq_a.weight": (16, 32),
        f"{at}.q_norm.weight": (16,),
        f"{at}.wq_b.weight": (64, 16),
        f"{at}.wkv.weight": (16, 32),
        f"{at}.kv_norm.weight": (16,),
        f"{at}.wo_a.weight": (16, 32),
        f"{at}.wo_b.weight": (32, 16),
        f"{at}.attn_sink": (4,),
    }


def _compressor(at: str, ratio: int, wide: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{at}.wkv.weight": (wide, 32),
        f"{at}.wgate.weight": (wide, 32),
        f"{at}.ape": (ratio, wide),
        f"{at}.norm.weight": (width,),
    }


def _uniform(size: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    """Values in [-1, 1) with 24 bits."""
    bits = np.random.PCG64(seed).random_raw(int(np.prod(size)))
    top = (bits >> np.uint64(40)).astype(np.float32)
    return (top / np.float32(1 << 23) - np.float32(1)).reshape(size)
