"""Models from a folder in Hugging Face layout: config.json, *.safetensors, tokenizer.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.common.text.assets import TextAssets
from services.engine.models.config import ModelConfig, ModelFileError, MoeConfig, RopeScaling

ARCHITECTURES = ("llama", "qwen3", "qwen3_moe")
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def read_json(path: Path) -> Any:
    """The file's value.

    Raises:
        ModelFileError: no such file, or not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path}: {error}") from error


def folder_config(folder: Path) -> ModelConfig:
    """Shape of the model in a folder.

    Raises:
        ModelFileError: an architecture, or a part of one, that is not served.
    """
    raw = read_json(folder / "config.json")
    if raw.get("model_type") not in ARCHITECTURES:
        raise ModelFileError(
            f"{folder}: model_type {raw.get('model_type')!r} is not supported, only "
            f"{', '.join(repr(name) for name in ARCHITECTURES)}"
        )
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if raw.get(key):
            raise ModelFileError(f"{folder}: {key} is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelFileError(f"{folder}: hidden_act must be 'silu'")
    try:
        return _config(raw, folder)
    except KeyError as error:
        raise ModelFileError(f"{folder}/config.json: {error} is missing") from error


def _config(raw: Mapping[str, Any], folder: Path) -> ModelConfig:
    heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = raw.get("rope_theta", rope.get("rope_theta", 10000.0))
    return ModelConfig(
        architecture=raw["model_type"],
        vocab_size=raw["vocab_size"],
        hidden_size=hidden,
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=raw.get("head_dim") or hidden // heads,
        intermediate_size=raw["intermediate_size"],
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=float(theta),
        max_position=raw.get("max_position_embeddings", 2048),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        rope_scaling=_scaling(rope, folder),
        moe=_moe(raw) if raw["model_type"].endswith("_moe") else None,
    )


def _moe(raw: Mapping[str, Any]) -> MoeConfig:
    """A layer has experts if its number (from 1) is a multiple of `decoder_sparse_step` and it is
    not listed as dense."""
    dense = raw.get("mlp_only_layers") or ()
    step = raw.get("decoder_sparse_step", 1)
    # transformers 5 writes the count under the name that most architectures use.
    count = raw["num_experts"] if "num_experts" in raw else raw["num_local_experts"]
    return MoeConfig(
        num_experts=count,
        top_k=raw["num_experts_per_tok"],
        intermediate_size=raw["moe_intermediate_size"],
        norm_topk_prob=bool(raw.get("norm_topk_prob", False)),
        layers=tuple(
            index
            for index in range(raw["num_hidden_layers"])
            if index not in dense and (index + 1) % step == 0
        ),
    )


def _scaling(rope: Mapping[str, Any], folder: Path) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ModelFileError(f"{folder}: rope type {kind!r} is not supported")
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_position=int(rope["original_max_position_embeddings"]),
    )


def folder_eos(folder: Path) -> tuple[int, ...]:
    """All end-of-sequence ids; generation_config.json has the last word."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        value = read_json(path).get("eos_token_id") if path.exists() else None
        if value is not None:
            return tuple(value) if isinstance(value, list) else (value,)
    return ()


def folder_text(folder: Path) -> TextAssets:
    """Tokenizer and chat template of a folder; needs no torch."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelFileError(f"{folder}: tokenizer.json is missing")
    config_path = folder / "tokenizer_config.json"
    config = read_json(config_path) if config_path.exists() else {}
    special = {name: _token(config[name]) for name in _TOKEN_NAMES if config.get(name)}
    return TextAssets.of(
        tokenizer_json=path.read_bytes(),
        chat_template=_template(folder, config),
        special_tokens=special,
        add_bos=bool(config.get("add_bos_token", False)),
    )


def _token(value: Any) -> str:
    return str(value["content"]) if isinstance(value, dict) else str(value)


def _template(folder: Path, config: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template") or ""
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        return str(named.get("default", ""))
    return str(template)
