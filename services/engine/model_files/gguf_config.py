"""Reads a model's configuration from the metadata of a GGUF file. Errors name file and key."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.engine.contract.model_config import (
    FactorsRope,
    LinearRope,
    ModelConfig,
    ModelFileError,
    MoeConfig,
    RopeScaling,
    YarnRope,
)
from services.engine.model_files.file_errors import naming_file
from services.engine.model_files.gguf_header import GgufHeader
from services.engine.model_files.json_keys import MAX_LAYERS, Keys

ARCHITECTURES: Mapping[str, str] = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma3": "gemma3",
}
"""`ModelConfig.architecture` by `general.architecture`; dense Mistral models are "llama" there."""
_DEFAULT_THETA = 10000.0
_GEMMA_PATTERN = 6
"""Every sixth layer of a Gemma 3 attends to all positions; the format has no key for it."""
_GEMMA_27B_LAYERS = 62
"""The one Gemma 3 whose scores are not scaled by its head size; the format has no key for it."""


def gguf_config(
    header: GgufHeader, path: Path, rope_factors: tuple[float, ...] | None
) -> ModelConfig:
    """Read and check the configuration.

    Args:
        rope_factors: divisors of the rotary frequencies, if the file has them.

    Raises:
        ModelFileError: a key is missing or wrong, or the architecture is not served.
    """
    name = str(header.metadata.get("general.architecture"))
    if name not in ARCHITECTURES:
        raise ModelFileError(
            f"{path}: general.architecture {name!r} is not supported, only "
            f"{', '.join(repr(known) for known in ARCHITECTURES)}"
        )
    keys = _own_keys(header.metadata, name, str(path))
    kind = ARCHITECTURES[name]
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFileError(f"{path}: tensor 'token_embd.weight' [vocabulary, hidden] is missing")
    if keys.count("expert_count", 0) and kind != "qwen3_moe":
        raise ModelFileError(f"{path}: {name}.expert_count: experts are served in qwen3moe only")
    heads, hidden = keys.count("attention.head_count"), keys.count("embedding_length")
    head_dim = keys.count("attention.key_length", 0) or hidden // max(1, heads)
    num_layers, window = (
        keys.count("block_count", most=MAX_LAYERS),
        keys.count("attention.sliding_window", 0),
    )
    scaling = FactorsRope(rope_factors) if rope_factors else _scaling(keys, path, head_dim)
    with naming_file(path):
        return ModelConfig(
            architecture=kind,
            vocab_size=embedding.shape[0],
            hidden_size=hidden,
            num_layers=num_layers,
            num_heads=heads,
            num_kv_heads=keys.count("attention.head_count_kv", 0) or heads,
            head_dim=head_dim,
            intermediate_size=keys.count("feed_forward_length", 0) or _expert_size(keys),
            rms_norm_eps=_short(keys.number("attention.layer_norm_rms_epsilon")),
            rope_theta=keys.number("rope.freq_base", _DEFAULT_THETA),
            max_position=keys.count("context_length"),
            tie_embeddings="output.weight" not in header.tensors,
            rope_scaling=scaling,
            moe=_moe(keys, num_layers) if kind == "qwen3_moe" else None,
            qkv_bias="blk.0.attn_q.bias" in header.tensors,
            output_bias="blk.0.attn_output.bias" in header.tensors,
            mlp_bias="blk.0.ffn_down.bias" in header.tensors,
            head_norms="blk.0.attn_q_norm.weight" in header.tensors,
            query_scale=(
                (hidden / heads) ** -0.5
                if kind == "gemma3" and num_layers == _GEMMA_27B_LAYERS
                else None
            ),
            sliding_rope_theta=_DEFAULT_THETA if kind == "gemma3" else None,
            sliding_window=window,
            sliding_layers=_sliding_layers(kind, num_layers) if window else (),
        )


def _sliding_layers(kind: str, num_layers: int) -> tuple[int, ...]:
    pattern = _GEMMA_PATTERN if kind == "gemma3" else num_layers + 1
    return tuple(index for index in range(num_layers) if (index + 1) % pattern)


def _own_keys(metadata: Mapping[str, Any], name: str, where: str) -> Keys:
    """The architecture's keys without the prefix of its name, which errors add again."""
    prefix = f"{name}."
    own = {
        key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)
    }
    return Keys(own, f"{where}: {name}")


def _short(value: float) -> float:
    """The decimal that the writer meant: GGUF stores 1e-5 as the nearest float32."""
    return float(f"{value:.7g}")


def _moe(keys: Keys, num_layers: int) -> MoeConfig:
    return MoeConfig(
        num_experts=keys.count("expert_count"),
        top_k=keys.count("expert_used_count"),
        intermediate_size=_expert_size(keys),
        norm_topk_prob=True,  # The format has no key for it; all published models set it.
        layers=tuple(range(num_layers)),
    )


def _expert_size(keys: Keys) -> int:
    return keys.count("expert_feed_forward_length")


def _scaling(keys: Keys, path: Path, head_dim: int) -> RopeScaling | None:
    rotated = keys.count("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ModelFileError(
            f"{path}: rope.dimension_count {rotated} is not the head size {head_dim}: partial "
            "rotation of heads is not supported"
        )
    kind = str(keys.get("rope.scaling.type") or "none")
    factor = keys.number("rope.scaling.factor", 0.0) or keys.number("rope.scale_linear", 1.0)
    if kind == "none" and factor == 1:
        return None
    if kind in ("linear", "none"):
        return LinearRope(factor)
    if kind == "yarn" and keys.get("rope.scaling.yarn_log_multiplier") is None:
        return YarnRope(
            factor=factor,
            original_max_position=keys.count("rope.scaling.original_context_length"),
            attention_factor=_yarn_attention(keys, factor),
        )
    raise ModelFileError(
        f"{path}: rope.scaling.type {kind!r} is not supported: use the model's Hugging Face folder"
    )


def _yarn_attention(keys: Keys, factor: float) -> float:
    own = keys.number("rope.scaling.attn_factor", 1.0)
    return own * (1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0)
