"""config.json of DeepSeek V4: the published keys, those of transformers, and what is refused."""

from typing import Any

import pytest

from services.engine.contract.deepseek_v4 import V4Layer
from services.engine.contract.model_config import ModelFileError, YarnRope
from services.engine.model_files.deepseek_v4 import deepseek_v4_config
from services.engine.model_files.json_keys import Keys
from tests.doubles.tiny_v4 import HEAVY, KEYS, tiny_config

FLASH: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "num_hash_layers": 3,
    "compress_ratios": [0, 0, *(4, 128) * 20, 4, 0],
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 1048576,
    "num_nextn_predict_layers": 1,
}
"""The published file of V4-Flash, in part."""


def read(**changes: Any):
    return deepseek_v4_config(Keys(FLASH | changes, "config.json"))


def test_the_published_keys():
    config = read()
    assert config.layers[0] == config.layers[1] == V4Layer("window", 0, hashed=True)
    assert config.layers[2] == V4Layer("indexed", 4, hashed=True)
    assert config.layers[3] == V4Layer("dense", 128)
    assert config.layers[42] == V4Layer("indexed", 4)
    assert (len(config.layers), config.mtp_layers, config.rope_dim) == (43, 1, 64)
    assert (config.routed_scale, config.swiglu_limit) == (1.5, 10)
    assert (config.rope_theta, config.compress_rope_theta) == (10000, 160000)
    assert config.compress_rope == YarnRope(16, 65536, 32, 1, attention_factor=1)


def test_the_keys_of_transformers_say_the_same():
    published = {
        name: value
        for name, value in KEYS.items()
        if name not in ("layer_types", "compress_rates", "mlp_layer_types", "partial_rotary_factor")
    }
    published |= {"compress_ratios": [0, 4, 8, 4, 8], "compress_rate_hca": 8}
    published |= {"num_hash_layers": 1, "qk_rope_head_dim": 4}
    assert deepseek_v4_config(Keys(published, "config.json")) == tiny_config()
    nested = {
        "main": {"rope_type": "default", "rope_theta": 10000.0},
        "compress": KEYS["rope_scaling"] | {"rope_theta": 160000.0, "attention_factor": 1.0},
    }
    changes = {"rope_scaling": None, "rope_theta": 5.0, "compress_rope_theta": 5.0}
    assert tiny_config(**changes, rope_parameters=nested) == tiny_config()


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"compress_ratios": [0, 4]}, "compress_ratios has 2 entries, but num_hidden_layers is 43"),
        ({"compress_ratios": [0, 7] + [0] * 42}, r"compress_ratios\[1\] is 7, .*only 0, 128, 4"),
        ({"compress_ratios": [False] * 43}, r"compress_ratios\[0\] is False"),
        ({"compress_ratios": None}, "'compress_ratios' is missing"),
        ({"compress_rates": {"compressed_sparse_attention": 128}}, "both compressed kinds"),
        ({"layer_types": [HEAVY] * 43, "compress_rates": {HEAVY: 1}}, "ratio is 1 in a layer of"),
        ({"layer_types": ["full_attention"] * 43}, r"layer_types\[0\] is 'full_attention'"),
        ({"mlp_layer_types": ["dense"] * 43}, r"mlp_layer_types\[0\] is 'dense'"),
        ({"mlp_layer_types": ["moe"]}, "mlp_layer_types has 1 entries"),
        ({"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported"),
        ({"n_shared_experts": 2}, "n_shared_experts 2 is not supported"),
        ({"norm_topk_prob": False}, "norm_topk_prob False is not supported"),
        ({"num_key_value_heads": 8}, "num_key_value_heads 8 is not supported"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings True is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type 'linear' is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 0.5}}, "factor must be at least 1, got 0.5"),
        (
            {"rope_scaling": FLASH["rope_scaling"] | {"attention_factor": 1.3}},
            "attention_factor is 1.3",
        ),
        ({"compress_rope_theta": 1.0}, "compress_rope_theta must be above 1"),
        ({"qk_rope_head_dim": 256}, "rope_dim is 256, it must be even and at most 128"),
        ({"o_groups": 7}, "num_heads is 64, it must be a multiple of output_groups"),
        ({"num_experts_per_tok": 257}, "top_k is 257, it must be 1 to 256"),
        ({"index_topk": 0}, "index_top_k is 0"),
        ({"hc_eps": 0.0}, "hyper_eps is 0.0, it must be above 0"),
        ({"q_lora_rank": None}, "'q_lora_rank' is missing"),
        ({"num_hidden_layers": 0}, "layers is empty"),
    ],
)
def test_what_is_not_served_is_refused_by_its_key(changes: dict[str, Any], wanted: str):
    with pytest.raises(ModelFileError, match=wanted):
        read(**changes)
