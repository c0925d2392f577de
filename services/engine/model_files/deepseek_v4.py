"""Reads config.json of a DeepSeek V4 model: the published keys, and those that transformers writes.

Published files list `compress_ratios`, `num_hash_layers`, `qk_rope_head_dim` and `rope_scaling`.
transformers writes the same facts as `layer_types` with `compress_rates`, `mlp_layer_types`,
`partial_rotary_factor` and `rope_parameters` with the parts `main` and `compress`.
"""

from collections.abc import Mapping
from typing import Any

from services.engine.contract.deepseek_v4 import DeepseekV4Config, LayerKind, V4Layer
from services.engine.contract.deepseek_v41 import DeepseekV41Config
from services.engine.contract.model_config import (
    ModelConfig,
    ModelFileError,
    MoeConfig,
    YarnRope,
)
from services.engine.model_files.json_keys import MAX_LAYERS, Keys

_KINDS: dict[str, LayerKind] = {
    "sliding_attention": "window",
    "compressed_sparse_attention": "indexed",
    "heavily_compressed_attention": "dense",
}
_RATES = {"indexed": 4, "dense": 128}
"""Published ratios; a file may give others under `compress_rates`."""
_OLD_RATE_KEYS = {"indexed": "compress_rate_csa", "dense": "compress_rate_hca"}
FIXED: Mapping[str, Any] = {
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
"""Keys with one supported value, which is also the default."""


def v4_model_config(keys: Keys) -> ModelConfig:
    """What every model has of a model with `model_type` "deepseek_v4", and its own configuration.

    Raises:
        ModelFileError: see `deepseek_v4_config`; or no layer compresses.
    """
    v4 = deepseek_v4_config(keys)
    if all(layer.kind == "window" for layer in v4.layers):
        raise ModelFileError(
            f"{keys.where}: no layer compresses: a deepseek_v4 without history is not supported"
        )
    return common_config(v4, "deepseek_v4")


def common_config(v4: DeepseekV4Config | DeepseekV41Config, architecture: str) -> ModelConfig:
    """What every model has of these."""
    return ModelConfig(
        architecture=architecture,
        vocab_size=v4.vocab_size,
        hidden_size=v4.hidden_size,
        num_layers=len(v4.layers),
        num_heads=v4.num_heads,
        num_kv_heads=1,
        head_dim=v4.head_dim,
        intermediate_size=v4.expert_size,
        rms_norm_eps=v4.rms_norm_eps,
        rope_theta=v4.rope_theta,
        max_position=v4.max_position,
        tie_embeddings=False,
        moe=MoeConfig(
            num_experts=v4.num_experts,
            top_k=v4.top_k,
            intermediate_size=v4.expert_size,
            norm_topk_prob=True,
            layers=tuple(range(len(v4.layers))),
            scale=v4.routed_scale,
            num_shared=1,
        ),
        mtp_layers=v4.mtp_layers,
        v4=v4,
    )


def deepseek_v4_config(keys: Keys) -> DeepseekV4Config:
    """The configuration of a model with `model_type` "deepseek_v4".

    Raises:
        ModelFileError: a key is missing, wrong or has a value that is not supported; the message
            names file and key.
    """
    check_fixed(keys, "deepseek_v4", FIXED)
    return DeepseekV4Config(layers=_layers(keys), **read_sizes(keys, "deepseek_v4"))


def check_fixed(keys: Keys, architecture: str, fixed: Mapping[str, Any]) -> None:
    """Check keys with one supported value.

    Raises:
        ModelFileError: one has another value.
    """
    for name, wanted in fixed.items():
        value = keys.get(name)
        if value is not None and (
            value != wanted or isinstance(value, bool) != isinstance(wanted, bool)
        ):
            raise ModelFileError(
                f"{keys.where}: {name} {value!r} is not supported for {architecture}, only "
                f"{wanted!r}"
            )


def read_sizes(keys: Keys, architecture: str, *, eps: float = 1e-6) -> dict[str, Any]:
    """The fields of `DeepseekSizes`.

    Args:
        eps: of norms, where the files do not say.

    Raises:
        ModelFileError: a key is missing or wrong.
    """
    head_dim = keys.count("head_dim")
    yarn = _compress_rope(keys, architecture)
    return {
        "vocab_size": keys.count("vocab_size"),
        "hidden_size": keys.count("hidden_size"),
        "num_heads": keys.count("num_attention_heads"),
        "head_dim": head_dim,
        "rope_dim": _rope_dim(keys, head_dim),
        "query_rank": keys.count("q_lora_rank"),
        "output_groups": keys.count("o_groups"),
        "output_rank": keys.count("o_lora_rank"),
        "window": keys.count("sliding_window"),
        "index_heads": keys.count("index_n_heads"),
        "index_dim": keys.count("index_head_dim"),
        "index_top_k": keys.count("index_topk"),
        "num_experts": keys.count("n_routed_experts"),
        "top_k": keys.count("num_experts_per_tok"),
        "expert_size": keys.count("moe_intermediate_size"),
        "routed_scale": keys.number("routed_scaling_factor", 1.5),
        "swiglu_limit": keys.number("swiglu_limit", 10.0),
        "streams": keys.count("hc_mult", 4),
        "sinkhorn_steps": keys.count("hc_sinkhorn_iters", 20),
        "hyper_eps": keys.number("hc_eps", 1e-6),
        "rms_norm_eps": keys.number("rms_norm_eps", eps),
        "rope_theta": _theta(keys, "rope_theta", 10000.0),
        "compress_rope_theta": _theta(keys, "compress_rope_theta", 160000.0),
        "compress_rope": yarn,
        "max_position": _max_position(keys, yarn),
        "mtp_layers": keys.count("num_nextn_predict_layers", 0),
    }


def _layers(keys: Keys) -> tuple[V4Layer, ...]:
    count = keys.count("num_hidden_layers", most=MAX_LAYERS)
    hashed = _hashed(keys, count)
    rates = _rates(keys)
    if types := keys.items("layer_types"):
        kinds = _listed(keys, "layer_types", types, count, _KINDS)
    elif ratios := keys.items("compress_ratios"):
        by_ratio: dict[Any, LayerKind] = {0: "window", rates["dense"]: "dense"}
        by_ratio[rates["indexed"]] = "indexed"
        kinds = _listed(keys, "compress_ratios", ratios, count, by_ratio)
    else:
        raise ModelFileError(
            f"{keys.where}: 'compress_ratios' is missing: one entry per layer, 0, "
            f"{rates['indexed']} or {rates['dense']}"
        )
    return tuple(
        V4Layer(kind, 0 if kind == "window" else rates[kind], index in hashed)
        for index, kind in enumerate(kinds)
    )


def _listed(
    keys: Keys, name: str, values: list[Any], count: int, meaning: dict[Any, LayerKind]
) -> list[LayerKind]:
    """What the list says of each layer; entries after the last layer are for MTP."""
    if len(values) < count:
        raise ModelFileError(
            f"{keys.where}: {name} has {len(values)} entries, but num_hidden_layers is {count}"
        )
    known = ", ".join(repr(value) for value in meaning)
    for index, value in enumerate(values[:count]):
        if isinstance(value, bool) or not isinstance(value, int | str) or value not in meaning:
            raise ModelFileError(
                f"{keys.where}: {name}[{index}] is {value!r}, which is not supported, only {known}"
            )
    return [meaning[value] for value in values[:count]]


def _hashed(keys: Keys, count: int) -> frozenset[int]:
    """Indices of the layers whose experts a table of token ids chooses."""
    types = keys.items("mlp_layer_types")
    if not types:
        return frozenset(range(min(count, keys.count("num_hash_layers", 3))))
    if len(types) < count:
        raise ModelFileError(
            f"{keys.where}: mlp_layer_types has {len(types)} entries, but num_hidden_layers is "
            f"{count}"
        )
    for index, value in enumerate(types[:count]):
        if value not in ("hash_moe", "moe"):
            raise ModelFileError(
                f"{keys.where}: mlp_layer_types[{index}] is {value!r}, which is not supported, "
                "only 'hash_moe' and 'moe'"
            )
    return frozenset(index for index in range(count) if types[index] == "hash_moe")


def _rates(keys: Keys) -> dict[str, int]:
    """Positions per entry, by the kind of layer."""
    given = keys.part("compress_rates")
    rates: dict[str, int] = {}
    for name, kind in _KINDS.items():
        if kind != "window":
            default = keys.count(_OLD_RATE_KEYS[kind], _RATES[kind])
            rates[kind] = given.count(name, default)
    if rates["indexed"] == rates["dense"]:
        raise ModelFileError(
            f"{keys.where}: both compressed kinds of layer have ratio {rates['dense']}; they must "
            "differ"
        )
    return rates


def _rope_dim(keys: Keys, head_dim: int) -> int:
    if "qk_rope_head_dim" in keys:
        return keys.count("qk_rope_head_dim")
    return int(head_dim * keys.number("partial_rotary_factor", 64 / 512))


def _theta(keys: Keys, name: str, default: float) -> float:
    part = keys.part("rope_parameters").part("main" if name == "rope_theta" else "compress")
    theta = part.number("rope_theta", 0.0) or keys.number(name, default)
    if theta <= 1:
        raise ModelFileError(f"{keys.where}: {name} must be above 1, got {theta}")
    return theta


def _compress_rope(keys: Keys, architecture: str) -> YarnRope | None:
    """The scaling of compressed layers; YaRN's factor of the scores is never applied."""
    rope = keys.part("rope_scaling", "rope_parameters")
    rope = rope.part("compress") if "compress" in rope else rope
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    if kind == "default":
        return None
    if kind != "yarn":
        raise ModelFileError(
            f"{rope.where}: rope_type {kind!r} is not supported for {architecture}, only 'yarn' "
            "and 'default'"
        )
    factor = rope.number("factor")
    if factor < 1:
        raise ModelFileError(f"{rope.where}: factor must be at least 1, got {factor}")
    return YarnRope(
        factor=factor,
        original_max_position=rope.count("original_max_position_embeddings"),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.number("attention_factor", 1.0),
    )


def _max_position(keys: Keys, yarn: YarnRope | None) -> int:
    own = keys.count("max_position_embeddings", 0)
    if own:
        return own
    if yarn is None:
        raise ModelFileError(f"{keys.where}: 'max_position_embeddings' is missing")
    return int(yarn.original_max_position * yarn.factor)
