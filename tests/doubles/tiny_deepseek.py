"""Writes tiny random models of DeepSeek's layout as Hugging Face folders; see tiny_model.py."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from tests.doubles.tiny_model import uniform, write_text_files

_CLASSES = {"deepseek_v3": "DeepseekV3ForCausalLM", "deepseek_v32": "DeepseekV32ForCausalLM"}
HIDDEN, HEADS, NOPE, ROPE, VALUE, KV_RANK = 48, 4, 8, 8, 12, 16
DENSE, EXPERT = 64, 16
"""Intermediate sizes."""


@dataclass(frozen=True, slots=True)
class DeepseekShape:
    """What to vary; the rest is fixed."""

    kind: str = "deepseek_v3"
    seed: int = 0
    num_layers: int = 3
    q_rank: int | None = 24
    yarn: bool = True
    first_dense: int = 1
    num_experts: int = 8
    top_k: int = 3
    groups: int = 4
    top_groups: int = 2
    num_shared: int = 1
    norm_topk_prob: bool = True
    index_heads: int = 16
    """More would be slower, fewer make equal scores: several of 0."""
    index_dim: int = 16
    index_top_k: int = 20
    draft_layers: int = 0
    max_position: int = 512


def write_tiny_deepseek(folder: Path, shape: DeepseekShape | None = None) -> Path:
    """Write config.json, model.safetensors, tokenizer.json and generation_config.json."""
    shape = shape or DeepseekShape()
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = write_text_files(folder)
    config = json.dumps(_config(shape, vocab_size), indent=1)
    (folder / "config.json").write_text(config, encoding="utf-8")
    save_file(_weights(shape, vocab_size), folder / "model.safetensors", {"format": "pt"})
    return folder


def _config(shape: DeepseekShape, vocab_size: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [_CLASSES[shape.kind]],
        "model_type": shape.kind,
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": DENSE,
        "moe_intermediate_size": EXPERT,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "q_lora_rank": shape.q_rank,
        "kv_lora_rank": KV_RANK,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE,
        "n_routed_experts": shape.num_experts,
        "num_experts_per_tok": shape.top_k,
        "n_shared_experts": shape.num_shared,
        "n_group": shape.groups,
        "topk_group": shape.top_groups,
        "norm_topk_prob": shape.norm_topk_prob,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "first_k_dense_replace": shape.first_dense,
        "num_nextn_predict_layers": shape.draft_layers,
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": vocab_size - 3,
        "eos_token_id": vocab_size - 2,
    }
    if shape.yarn:
        config["rope_scaling"] = {
            "type": "yarn",
            "factor": 4,
            "original_max_position_embeddings": shape.max_position // 4,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        }
    if shape.kind == "deepseek_v32":
        config |= {
            "index_n_heads": shape.index_heads,
            "index_head_dim": shape.index_dim,
            "index_topk": shape.index_top_k,
        }
    return config


def _weights(shape: DeepseekShape, vocab_size: int) -> dict[str, NDArray[np.float32]]:
    weights = {}
    first = shape.seed * 10_000
    for order, (name, size) in enumerate(_sizes(shape, vocab_size).items()):
        draw = uniform(size, first + order)
        if name.endswith("norm.weight"):
            draw = 1 + draw / 4
        elif len(size) == 1:
            draw = draw / 4
        elif name.startswith("model.embed_tokens"):
            draw = 2 * draw
        else:
            draw = draw * (1.0 if name.startswith("lm_head") else 3.0) / size[1] ** 0.5
        weights[name] = np.asarray(draw, dtype=np.float32)
    return weights


def _sizes(shape: DeepseekShape, vocab_size: int) -> dict[str, tuple[int, ...]]:
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab_size, HIDDEN),
        "lm_head.weight": (vocab_size, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for index in range(shape.num_layers):
        sizes |= _layer(shape, f"model.layers.{index}", dense=index < shape.first_dense)
    for index in range(shape.num_layers, shape.num_layers + shape.draft_layers):
        at = f"model.layers.{index}"
        sizes |= _layer(shape, at, dense=False)
        sizes |= {
            f"{at}.eh_proj.weight": (HIDDEN, 2 * HIDDEN),
            f"{at}.enorm.weight": (HIDDEN,),
            f"{at}.hnorm.weight": (HIDDEN,),
            f"{at}.shared_head.norm.weight": (HIDDEN,),
        }
    return sizes


def _layer(shape: DeepseekShape, at: str, *, dense: bool) -> dict[str, tuple[int, ...]]:
    sizes = _attention(shape, f"{at}.self_attn")
    sizes[f"{at}.input_layernorm.weight"] = (HIDDEN,)
    sizes[f"{at}.post_attention_layernorm.weight"] = (HIDDEN,)
    if dense:
        return sizes | _mlp(f"{at}.mlp", DENSE)
    sizes[f"{at}.mlp.gate.weight"] = (shape.num_experts, HIDDEN)
    sizes[f"{at}.mlp.gate.e_score_correction_bias"] = (shape.num_experts,)
    for expert in range(shape.num_experts):
        sizes |= _mlp(f"{at}.mlp.experts.{expert}", EXPERT)
    if shape.num_shared:
        sizes |= _mlp(f"{at}.mlp.shared_experts", EXPERT * shape.num_shared)
    return sizes


def _attention(shape: DeepseekShape, at: str) -> dict[str, tuple[int, ...]]:
    queries = HEADS * (NOPE + ROPE)
    sizes: dict[str, tuple[int, ...]] = {
        f"{at}.kv_a_proj_with_mqa.weight": (KV_RANK + ROPE, HIDDEN),
        f"{at}.kv_a_layernorm.weight": (KV_RANK,),
        f"{at}.kv_b_proj.weight": (HEADS * (NOPE + VALUE), KV_RANK),
        f"{at}.o_proj.weight": (HIDDEN, HEADS * VALUE),
    }
    if shape.q_rank is None:
        sizes[f"{at}.q_proj.weight"] = (queries, HIDDEN)
    else:
        sizes[f"{at}.q_a_proj.weight"] = (shape.q_rank, HIDDEN)
        sizes[f"{at}.q_a_layernorm.weight"] = (shape.q_rank,)
        sizes[f"{at}.q_b_proj.weight"] = (queries, shape.q_rank)
    if shape.kind == "deepseek_v32" and shape.q_rank is not None:
        own = f"{at}.indexer"
        sizes |= {
            f"{own}.wq_b.weight": (shape.index_heads * shape.index_dim, shape.q_rank),
            f"{own}.wk.weight": (shape.index_dim, HIDDEN),
            f"{own}.k_norm.weight": (shape.index_dim,),
            f"{own}.k_norm.bias": (shape.index_dim,),
            f"{own}.weights_proj.weight": (shape.index_heads, HIDDEN),
        }
    return sizes


def _mlp(at: str, middle: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{at}.gate_proj.weight": (middle, HIDDEN),
        f"{at}.up_proj.weight": (middle, HIDDEN),
        f"{at}.down_proj.weight": (HIDDEN, middle),
    }
