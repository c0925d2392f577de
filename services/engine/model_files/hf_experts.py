"""Reads the keys of config.json that describe a model's experts, by architecture."""

from services.engine.contract.model_config import ModelFileError, MoeConfig
from services.engine.model_files.json_keys import Keys


def read_experts(keys: Keys, kind: str, num_layers: int) -> MoeConfig | None:
    """The experts of a model; None if the architecture has none.

    Raises:
        ModelFileError: a key is missing or wrong.
    """
    match kind:
        case "qwen3_moe":
            return _qwen3(keys, num_layers)
        case "mixtral" | "gpt_oss":
            return MoeConfig(
                num_experts=_count(keys),
                top_k=keys.count("num_experts_per_tok"),
                intermediate_size=keys.count("intermediate_size"),
                norm_topk_prob=True,
                layers=tuple(range(num_layers)),
            )
        case "glm4_moe":
            return _glm4(keys, num_layers)
    return None


def _qwen3(keys: Keys, num_layers: int) -> MoeConfig:
    """A layer has experts if its number (from 1) is a multiple of `decoder_sparse_step` and
    `mlp_only_layers` does not list its index."""
    dense = keys.items("mlp_only_layers")
    step = keys.count("decoder_sparse_step", 1)
    if step < 1:
        raise ModelFileError(f"decoder_sparse_step must be at least 1, got {step}")
    return MoeConfig(
        num_experts=_count(keys),
        top_k=keys.count("num_experts_per_tok"),
        intermediate_size=keys.count("moe_intermediate_size"),
        norm_topk_prob=keys.flag("norm_topk_prob"),
        layers=tuple(
            index for index in range(num_layers) if index not in dense and (index + 1) % step == 0
        ),
    )


def _glm4(keys: Keys, num_layers: int) -> MoeConfig:
    keys.check_fixed({"scoring_func": "sigmoid", "topk_method": "noaux_tc"})
    return MoeConfig(
        num_experts=keys.count("n_routed_experts"),
        top_k=keys.count("num_experts_per_tok"),
        intermediate_size=keys.count("moe_intermediate_size"),
        norm_topk_prob=keys.flag("norm_topk_prob", default=True),
        layers=tuple(range(keys.count("first_k_dense_replace", 1), num_layers)),
        scale=keys.number("routed_scaling_factor", 1.0),
        groups=keys.count("n_group", 1),
        top_groups=keys.count("topk_group", 1),
        num_shared=keys.count("n_shared_experts", 1),
    )


def _count(keys: Keys) -> int:
    # transformers 5 writes the count under the key that most architectures use.
    return keys.count("num_experts" if "num_experts" in keys else "num_local_experts")
