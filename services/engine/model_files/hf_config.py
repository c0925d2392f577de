"""Reads and checks config.json of a Hugging Face folder. Errors name file and key."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.engine.contract.model_config import ModelConfig, ModelFileError, MoeConfig
from services.engine.model_files.file_errors import naming_file
from services.engine.model_files.hf_rope import max_position, rope_scaling, rope_theta
from services.engine.model_files.json_keys import MAX_LAYERS, Keys, read_json

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
_WITHOUT_BIAS_KEYS = ("mistral", "qwen2")
_DEFAULT_WINDOW = 4096
"""Sliding window of a mistral or qwen file without the key `sliding_window`."""


def folder_config(folder: Path) -> ModelConfig:
    """The configuration of the model in a folder.

    Raises:
        ModelFileError: a key is missing or wrong, or the architecture is not served.
    """
    path = folder / "config.json"
    raw = read_json(path)
    if not isinstance(raw, dict):
        raise ModelFileError(f"{path}: not a JSON object")
    kind = raw.get("model_type")
    if kind not in ARCHITECTURES:
        raise ModelFileError(
            f"{path}: model_type {kind!r} is not supported, only "
            f"{', '.join(repr(name) for name in ARCHITECTURES)}"
        )
    _check_supported(raw, path)
    keys = Keys(raw, str(path))
    with naming_file(path):
        return _config(keys, kind)


def _check_supported(raw: Mapping[str, Any], path: Path) -> None:
    """Reject keys that change the model's results and are not supported."""
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelFileError(f"{path}: hidden_act must be 'silu', got {raw['hidden_act']!r}")
    if quantised := raw.get("quantization_config"):
        method = quantised.get("quant_method", "?") if isinstance(quantised, dict) else quantised
        raise ModelFileError(
            f"{path}: quantization_config ({method}) is not supported: use the original folder "
            "(dtype=int8 quantises it at load) or a GGUF file"
        )
    factor = raw.get("partial_rotary_factor", 1)
    if factor not in (None, 1):
        raise ModelFileError(f"{path}: partial_rotary_factor {factor} is not supported, only 1")


def _config(keys: Keys, kind: str) -> ModelConfig:
    heads, hidden = keys.count("num_attention_heads"), keys.count("hidden_size")
    num_layers = keys.count("num_hidden_layers", most=MAX_LAYERS)
    bias = kind not in _WITHOUT_BIAS_KEYS and keys.flag("attention_bias")
    theta = rope_theta(keys)
    window, sliding = _window(keys, kind, num_layers)
    head_dim = keys.count("head_dim", 0)
    if not heads or (not head_dim and hidden % heads):
        raise ModelFileError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, "
            "and head_dim is missing"
        )
    return ModelConfig(
        architecture=kind,
        vocab_size=keys.count("vocab_size"),
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=keys.count("num_key_value_heads", 0) or heads,
        head_dim=head_dim or hidden // heads,
        intermediate_size=keys.count("intermediate_size"),
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        max_position=max_position(keys),
        tie_embeddings=keys.flag("tie_word_embeddings"),
        rope_scaling=rope_scaling(keys),
        moe=_moe(keys, num_layers) if kind.endswith("_moe") else None,
        qkv_bias=bias or kind == "qwen2",
        output_bias=bias,
        mlp_bias=kind == "llama" and keys.flag("mlp_bias"),
        sliding_window=window,
        sliding_layers=sliding,
    )


def _window(keys: Keys, kind: str, num_layers: int) -> tuple[int, tuple[int, ...]]:
    """Sliding window, and the layers that use it; the keys mean the same as in transformers."""
    every = tuple(range(num_layers))
    if kind == "llama" or (kind != "mistral" and not keys.flag("use_sliding_window")):
        return 0, ()
    if "sliding_window" in keys and keys["sliding_window"] is None:
        return 0, ()
    window = keys.count("sliding_window", _DEFAULT_WINDOW)
    if window < 1:
        raise ModelFileError(f"sliding_window must be at least 1, got {window}")
    if kind in ("mistral", "qwen3_moe"):
        return window, every
    if types := keys.items("layer_types"):
        layers = tuple(index for index in every if types[index : index + 1] == _SLIDING)
    else:
        layers = every[keys.count("max_window_layers", 28) :]
    return (window, layers) if layers else (0, ())


_SLIDING = ["sliding_attention"]


def _moe(keys: Keys, num_layers: int) -> MoeConfig:
    """Read the experts' keys.

    A layer has experts if its number (from 1) is a multiple of `decoder_sparse_step` and
    `mlp_only_layers` does not list its index.
    """
    dense = keys.items("mlp_only_layers")
    step = keys.count("decoder_sparse_step", 1)
    if step < 1:
        raise ModelFileError(f"decoder_sparse_step must be at least 1, got {step}")
    # transformers 5 writes the count under the key that most architectures use.
    name = "num_experts" if "num_experts" in keys else "num_local_experts"
    return MoeConfig(
        num_experts=keys.count(name),
        top_k=keys.count("num_experts_per_tok"),
        intermediate_size=keys.count("moe_intermediate_size"),
        norm_topk_prob=keys.flag("norm_topk_prob"),
        layers=tuple(
            index for index in range(num_layers) if index not in dense and (index + 1) % step == 0
        ),
    )
