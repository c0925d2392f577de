"""Reads config.json of DeepSeek-V3 and V3.2; every key that changes results is read or refused."""

from services.engine.contract.model_config import (
    IndexConfig,
    MlaConfig,
    ModelConfig,
    ModelFileError,
    MoeConfig,
)
from services.engine.model_files.hf_rope import (
    max_position,
    rope_scaling,
    rope_theta,
    score_scale,
)
from services.engine.model_files.json_keys import MAX_LAYERS, Keys

DEEPSEEK = ("deepseek_v3", "deepseek_v32")
_FIXED = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "rope_interleave": True,
    "attention_bias": False,
    "mlp_bias": False,
}
"""Keys that may have one value only."""
_KINDS = ("dense", "sparse")


def deepseek_config(keys: Keys, kind: str) -> ModelConfig:
    """The configuration of a model of one of the kinds DEEPSEEK.

    Raises:
        ModelFileError: a key is missing or wrong, or has a value that is not served.
    """
    keys.check_fixed(_FIXED)
    num_layers = keys.count("num_hidden_layers", most=MAX_LAYERS)
    heads = keys.count("num_attention_heads")
    return ModelConfig(
        architecture=kind,
        vocab_size=keys.count("vocab_size"),
        hidden_size=keys.count("hidden_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=heads or 1,
        head_dim=keys.count("qk_rope_head_dim"),
        intermediate_size=keys.count("intermediate_size"),
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        rope_theta=rope_theta(keys, kind),
        max_position=max_position(keys, kind),
        tie_embeddings=keys.flag("tie_word_embeddings"),
        rope_scaling=rope_scaling(keys, kind, keys.count("qk_rope_head_dim")),
        moe=_moe(keys, num_layers),
        mla=_mla(keys, kind),
        mtp_layers=keys.count("num_nextn_predict_layers", 0, most=MAX_LAYERS),
    )


def _mla(keys: Keys, kind: str) -> MlaConfig:
    nope, rope = _positive(keys, "qk_nope_head_dim"), _positive(keys, "qk_rope_head_dim")
    index = None
    if kind == "deepseek_v32":
        index = IndexConfig(
            heads=_positive(keys, "index_n_heads"),
            dim=_positive(keys, "index_head_dim"),
            top_k=_positive(keys, "index_topk"),
        )
    return MlaConfig(
        q_rank=None if keys.get("q_lora_rank") is None else _positive(keys, "q_lora_rank"),
        kv_rank=_positive(keys, "kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rope,
        value_dim=_positive(keys, "v_head_dim"),
        scale=(nope + rope) ** -0.5 * score_scale(keys, kind),
        index=index,
    )


def _moe(keys: Keys, num_layers: int) -> MoeConfig | None:
    """Read the experts' keys; None if all layers are dense."""
    layers = _sparse_layers(keys, num_layers)
    if not layers:
        return None
    return MoeConfig(
        num_experts=_positive(keys, "n_routed_experts"),
        top_k=keys.count("num_experts_per_tok"),
        intermediate_size=_positive(keys, "moe_intermediate_size"),
        norm_topk_prob=keys.flag("norm_topk_prob", default=True),
        layers=layers,
        scale=keys.number("routed_scaling_factor"),
        groups=_positive(keys, "n_group"),
        top_groups=keys.count("topk_group"),
        num_shared=keys.count("n_shared_experts", 0),
    )


def _sparse_layers(keys: Keys, num_layers: int) -> tuple[int, ...]:
    """Indices of the layers with experts: as listed, else all after the first dense ones."""
    kinds = keys.items("mlp_layer_types")
    if not kinds:
        return tuple(range(keys.count("first_k_dense_replace"), num_layers))
    if len(kinds) != num_layers or any(kind not in _KINDS for kind in kinds):
        raise ModelFileError(
            f"{keys.where}: mlp_layer_types must list {num_layers} times 'dense' or 'sparse', "
            f"got {kinds!r:.80}"
        )
    return tuple(index for index, kind in enumerate(kinds) if kind == "sparse")


def _positive(keys: Keys, name: str) -> int:
    value = keys.count(name)
    if value < 1:
        raise ModelFileError(f"{keys.where}: {name} is {value}, it must be at least 1")
    return value
