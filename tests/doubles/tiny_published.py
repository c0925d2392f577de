"""Tiny random models of more architectures than `tiny_model` writes, in their published layout.

A kind is its config.json and the shapes of its tensors. Weights come from an integer hash, so that
every machine and version writes equal bytes.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.doubles.tiny_model import uniform, write_text_files

VOCABULARY = 259
HIDDEN, HEADS, GROUPS = 48, 4, 2
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Published:
    """A tiny model: what its config.json says, and which tensors it has."""

    config: Mapping[str, Any]
    shapes: Shapes
    seed: int = 0
    norm_center: float = 1.0
    """Around which its norms are stored."""
    embedding: float = 1.0
    """Largest value of its embedding; less where the model multiplies it."""


def write_published(folder: Path, model: Published) -> Path:
    """Write config.json, model.safetensors and the tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text_files(folder)
    config = json.dumps(dict(model.config), indent=1)
    (folder / "config.json").write_text(config, encoding="utf-8")
    weights = {}
    for order, (name, shape) in enumerate(model.shapes.items()):
        value = uniform(shape, model.seed * 100_000 + order)
        weights[name] = np.asarray(_scaled(name, value, model), dtype=np.float32)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def _scaled(name: str, value: Any, model: Published) -> Any:
    if "norm" in name:
        return model.norm_center + value / 4
    if "embed" in name or "lm_head" in name:
        return value * model.embedding
    if value.ndim == 1 or name.endswith("_bias"):
        return value / 2
    # Stacks of experts have inputs before outputs.
    inputs = value.shape[-2] if value.ndim == 3 else value.shape[-1]
    return value * (2.5 / inputs**0.5)


def _base(kind: str, name: str, layers: int, **fields: Any) -> dict[str, Any]:
    config = {
        "architectures": [name],
        "model_type": kind,
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": VOCABULARY - 3,
        "eos_token_id": VOCABULARY - 2,
        "pad_token_id": None,
    }
    return config | fields


def _attention(at: str, dim: int, *, joined: bool = False) -> Shapes:
    rows = {"q_proj": HEADS * dim, "k_proj": GROUPS * dim, "v_proj": GROUPS * dim}
    if joined:
        rows = {"qkv_proj": sum(rows.values())}
    shapes: Shapes = {f"{at}.self_attn.{n}.weight": (size, HIDDEN) for n, size in rows.items()}
    return shapes | {f"{at}.self_attn.o_proj.weight": (HIDDEN, HEADS * dim)}


def _biases(at: str, dim: int, *, output: bool) -> Shapes:
    rows = {"q_proj": HEADS * dim, "k_proj": GROUPS * dim, "v_proj": GROUPS * dim}
    rows |= {"o_proj": HIDDEN} if output else {}
    return {f"{at}.self_attn.{name}.bias": (size,) for name, size in rows.items()}


def _mlp(at: str, size: int, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")):
    gate, up, down = names
    return {
        f"{at}.{gate}.weight": (size, HIDDEN),
        f"{at}.{up}.weight": (size, HIDDEN),
        f"{at}.{down}.weight": (HIDDEN, size),
    }


def _norms(at: str, *names: str, size: int = HIDDEN) -> Shapes:
    return {f"{at}.{name}.weight": (size,) for name in names}


def _whole(layers: int, layer: Callable[[str, int], Shapes], *, tied: bool = False) -> Shapes:
    shapes: Shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for index in range(layers):
        shapes |= layer(f"model.layers.{index}", index)
    shapes |= _norms("model", "norm")
    return shapes if tied else shapes | {"lm_head.weight": (VOCABULARY, HIDDEN)}


_PRE = ("input_layernorm", "post_attention_layernorm")


def mixtral(*, window: int | None = None, seed: int = 31) -> Published:
    """2 of 4 experts in every layer."""

    def layer(at: str, _index: int) -> Shapes:
        moe = f"{at}.block_sparse_moe"
        shapes = _attention(at, 12) | _norms(at, *_PRE) | {f"{moe}.gate.weight": (4, HIDDEN)}
        for expert in range(4):
            shapes |= _mlp(f"{moe}.experts.{expert}", 40, ("w1", "w3", "w2"))
        return shapes

    config = _base(
        "mixtral",
        "MixtralForCausalLM",
        2,
        intermediate_size=40,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=window,
        rope_theta=10000.0,
    )
    return Published(config, _whole(2, layer), seed)


def phi3(*, long: bool = False, share: float = 1.0, window: int | None = None) -> Published:
    """Joined projections; `long`: LongRoPE, of which the original length is served."""
    dim = HIDDEN // HEADS

    def layer(at: str, _index: int) -> Shapes:
        return (
            _attention(at, dim, joined=True)
            | _norms(at, *_PRE)
            | {
                f"{at}.mlp.gate_up_proj.weight": (160, HIDDEN),
                f"{at}.mlp.down_proj.weight": (HIDDEN, 80),
            }
        )

    config = _base(
        "phi3",
        "Phi3ForCausalLM",
        2,
        intermediate_size=80,
        rope_theta=10000.0,
        partial_rotary_factor=share,
        sliding_window=window,
    )
    if long:
        pairs = int(dim * share) // 2
        config |= {
            "max_position_embeddings": 1024,
            "original_max_position_embeddings": 256,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0 + index / 8 for index in range(pairs)],
                "long_factor": [2.0 + index for index in range(pairs)],
            },
        }
    return Published(config, _whole(2, layer), 32 + long)


def glm4_moe(*, norms: bool = True, bias: bool = True, groups: int = 4) -> Published:
    """A dense layer, then 3 of 16 experts from 2 groups, and a shared one; half heads rotated."""
    dim = 16

    def layer(at: str, index: int) -> Shapes:
        shapes = _attention(at, dim) | _norms(at, *_PRE)
        shapes |= _biases(at, dim, output=False) if bias else {}
        shapes |= _norms(f"{at}.self_attn", "q_norm", "k_norm", size=dim) if norms else {}
        if index == 0:
            return shapes | _mlp(f"{at}.mlp", 64)
        shapes |= {
            f"{at}.mlp.gate.weight": (16, HIDDEN),
            f"{at}.mlp.gate.e_score_correction_bias": (16,),
        }
        for expert in range(16):
            shapes |= _mlp(f"{at}.mlp.experts.{expert}", 24)
        return shapes | _mlp(f"{at}.mlp.shared_experts", 24)

    config = _base(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        3,
        head_dim=dim,
        intermediate_size=64,
        moe_intermediate_size=24,
        n_routed_experts=16,
        num_experts_per_tok=3,
        n_shared_experts=1,
        n_group=groups,
        topk_group=max(1, groups // 2),
        first_k_dense_replace=1,
        routed_scaling_factor=1.5,
        norm_topk_prob=True,
        attention_bias=bias,
        use_qk_norm=norms,
        partial_rotary_factor=0.5,
        rope_theta=10000.0,
    )
    return Published(config, _whole(3, layer), 33 + norms)


def gpt_oss() -> Published:
    """Sinks, 2 of 6 experts with biases, a window in every other layer, YaRN."""
    dim = 16

    def layer(at: str, _index: int) -> Shapes:
        experts = f"{at}.mlp.experts"
        return (
            _attention(at, dim)
            | _biases(at, dim, output=True)
            | _norms(at, *_PRE)
            | {
                f"{at}.self_attn.sinks": (HEADS,),
                f"{at}.mlp.router.weight": (6, HIDDEN),
                f"{at}.mlp.router.bias": (6,),
                f"{experts}.gate_up_proj": (6, HIDDEN, 64),
                f"{experts}.gate_up_proj_bias": (6, 64),
                f"{experts}.down_proj": (6, 32, HIDDEN),
                f"{experts}.down_proj_bias": (6, HIDDEN),
            }
        )

    config = _base(
        "gpt_oss",
        "GptOssForCausalLM",
        3,
        head_dim=dim,
        intermediate_size=32,
        num_local_experts=6,
        num_experts_per_tok=2,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_theta=150000.0,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
        swiglu_limit=7.0,
        attention_bias=True,
    )
    return Published(config, _whole(3, layer), 35)


def gemma3(*, scalar: int = 16, linear: float | None = None) -> Published:
    """Five layers with a window for one without; two rotary embeddings; tied.

    Args:
        linear: divides the frequencies of layers without the window, as in the larger models.
    """
    dim = 16

    def layer(at: str, _index: int) -> Shapes:
        names = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
        return (
            _attention(at, dim)
            | _norms(at, *_PRE, *names)
            | _norms(f"{at}.self_attn", "q_norm", "k_norm", size=dim)
            | _mlp(f"{at}.mlp", 72)
        )

    config = _base(
        "gemma3_text",
        "Gemma3ForCausalLM",
        6,
        head_dim=dim,
        intermediate_size=72,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=scalar,
        sliding_window=24,
        sliding_window_pattern=6,
        rope_theta=1000000.0,
        rope_local_base_freq=10000.0,
        tie_word_embeddings=True,
    )
    if linear:
        config["rope_scaling"] = {"rope_type": "linear", "factor": linear}
    return Published(config, _whole(6, layer, tied=True), 36, norm_center=0.0, embedding=0.25)


PUBLISHED: Mapping[str, Callable[[], Published]] = {
    "mixtral": mixtral,
    "mixtral_window": lambda: mixtral(window=20, seed=30),
    "phi3": lambda: phi3(window=60),
    "phi3_longrope": lambda: phi3(long=True, share=0.5),
    "glm4_moe": glm4_moe,
    "glm4_moe_plain": lambda: glm4_moe(norms=False, bias=False, groups=1),
    "gpt_oss": gpt_oss,
    "gemma3": gemma3,
    "gemma3_scaled": lambda: gemma3(scalar=24),
    "gemma3_linear": lambda: gemma3(linear=8.0),
}
"""By the name of their golden data."""
