"""Reads and checks config.json of a Hugging Face folder. Errors name file and key."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.engine.contract.model_config import ModelConfig, ModelFileError
from services.engine.model_files.deepseek_v4 import v4_model_config
from services.engine.model_files.deepseek_v41 import v41_model_config
from services.engine.model_files.file_errors import naming_file
from services.engine.model_files.hf_deepseek import DEEPSEEK, deepseek_config
from services.engine.model_files.hf_experts import read_experts
from services.engine.model_files.hf_rope import (
    max_position,
    rope_scaling,
    rope_theta,
    rotary_dim,
    sliding_theta,
)
from services.engine.model_files.hf_windows import read_window
from services.engine.model_files.json_keys import MAX_LAYERS, Keys, read_json

ARCHITECTURES: Mapping[str, str] = {
    **{
        name: name
        for name in ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "phi3")
    },
    "glm4_moe": "glm4_moe",
    "gpt_oss": "gpt_oss",
    "gemma3_text": "gemma3",
    **{name: name for name in DEEPSEEK},
    "deepseek_v4": "deepseek_v4",
    "deepseek_v41": "deepseek_v41",
    "deepseek_v41_text": "deepseek_v41",
}
"""`ModelConfig.architecture` by `model_type`."""
_WITHOUT_BIAS_KEYS = ("mistral", "qwen2", "mixtral", "phi3")
_HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3")
_HEAD_DIMS: Mapping[str, int] = {"gpt_oss": 64, "gemma3": 256}
"""Head size of files without the key, where it is not hidden_size / num_attention_heads."""
_EPS: Mapping[str, float] = dict.fromkeys(("mixtral", "phi3", "glm4_moe", "gpt_oss"), 1e-5)
_ACTIVATION: Mapping[str, str] = {"gemma3": "gelu_pytorch_tanh"}
_FIXED: Mapping[str, Mapping[str, Any]] = {
    "gpt_oss": {"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    "gemma3": {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
}
"""Keys of which one value is served, the default."""


def folder_config(folder: Path) -> ModelConfig:
    """The configuration of the model in a folder.

    Raises:
        ModelFileError: a key is missing or wrong, or the architecture is not served.
    """
    path = folder / "config.json"
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise ModelFileError(f"{path}: not a JSON object")
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ModelFileError(
            f"{path}: model_type {name!r} is not supported, only "
            f"{', '.join(repr(known) for known in ARCHITECTURES)}"
        )
    kind = ARCHITECTURES[name]
    _check_supported(raw, path, kind)
    keys = Keys(raw, str(path))
    with naming_file(path):
        if kind == "deepseek_v4":
            return v4_model_config(keys)
        if kind == "deepseek_v41":
            return v41_model_config(keys)
        return deepseek_config(keys, kind) if kind in DEEPSEEK else _config(keys, kind)


def _check_supported(raw: Mapping[str, Any], path: Path, kind: str) -> None:
    """Reject keys that change the model's results and are not supported."""
    wanted = _ACTIVATION.get(kind, "silu")
    for key in ("hidden_act", "hidden_activation"):
        if raw.get(key) not in (None, wanted):
            raise ModelFileError(f"{path}: {key} must be {wanted!r}, got {raw[key]!r}")
    for key, value in _FIXED.get(kind, {}).items():
        if raw.get(key) not in (None, value):
            raise ModelFileError(f"{path}: {key} {raw[key]!r} is not supported, only {value!r}")


def _config(keys: Keys, kind: str) -> ModelConfig:
    heads, hidden = keys.count("num_attention_heads"), keys.count("hidden_size")
    num_layers = keys.count("num_hidden_layers", most=MAX_LAYERS)
    head_dim = keys.count("head_dim", _HEAD_DIMS.get(kind, 0))
    if not heads or (not head_dim and hidden % heads):
        raise ModelFileError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, "
            "and head_dim is missing"
        )
    head_dim = head_dim or hidden // heads
    bias = kind not in _WITHOUT_BIAS_KEYS and keys.flag("attention_bias", default=kind == "gpt_oss")
    window, sliding = read_window(keys, kind, num_layers)
    rotated = rotary_dim(keys, kind, head_dim)
    return ModelConfig(
        architecture=kind,
        vocab_size=keys.count("vocab_size"),
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=keys.count("num_key_value_heads", 0) or heads,
        head_dim=head_dim,
        intermediate_size=keys.count("intermediate_size"),
        rms_norm_eps=keys.number("rms_norm_eps", _EPS.get(kind, 1e-6)),
        rope_theta=rope_theta(keys, kind),
        max_position=max_position(keys, kind),
        tie_embeddings=keys.flag("tie_word_embeddings", default=kind == "gemma3"),
        rope_scaling=rope_scaling(keys, kind, rotated or head_dim),
        moe=read_experts(keys, kind, num_layers),
        qkv_bias=bias or kind == "qwen2",
        output_bias=bias and kind != "glm4_moe",
        mlp_bias=kind == "llama" and keys.flag("mlp_bias"),
        head_norms=kind in _HEAD_NORMS or (kind == "glm4_moe" and keys.flag("use_qk_norm")),
        query_scale=_query_scale(keys) if kind == "gemma3" else None,
        rotary_dim=rotated,
        sliding_rope_theta=sliding_theta(keys, kind),
        sliding_window=window,
        sliding_layers=sliding,
        mtp_layers=_mtp_layers(keys) if kind == "glm4_moe" else 0,
    )


def _mtp_layers(keys: Keys) -> int:
    return keys.count("num_nextn_predict_layers", 0, most=MAX_LAYERS)


def _query_scale(keys: Keys) -> float:
    scalar = keys.number("query_pre_attn_scalar", 256.0)
    if scalar <= 0:
        raise ModelFileError(f"query_pre_attn_scalar must be above 0, got {scalar}")
    return 1 / math.sqrt(scalar)
