"""DeepSeek-V3 and V3.2: latent attention, grouped experts; V3.2 attends to what an indexer chooses.

Without the layer that drafts tokens, which engines need not load.
"""

from collections.abc import Iterator

from services.engine.tiny_models.declaration import Config, Declaration, Kind, TinyTensor
from services.engine.tiny_models.declarations import decoder, grouped

_CONFIG = {
    **{key: value for key, value in decoder.SIZES.items() if key != "head_dim"},
    **grouped.EXPERTS,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "moe_layer_freq": 1,
    "attention_bias": False,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 512,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
_INDEXER = {"index_n_heads": 16, "index_head_dim": 16, "index_topk": 24}
_RANKS = ("q_lora_rank", "kv_lora_rank")
_DIMS = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def _tensors(config: Config) -> Iterator[TinyTensor]:
    hidden = config["hidden_size"]
    yield from decoder.ends(config)
    for index, at in decoder.layers(config):
        yield TinyTensor(f"{at}.input_layernorm.weight", (hidden,), Kind.NORM)
        yield from _attention(config, f"{at}.self_attn")
        if "index_topk" in config:
            yield from _indexer(config, f"{at}.self_attn.indexer")
        yield TinyTensor(f"{at}.post_attention_layernorm.weight", (hidden,), Kind.NORM)
        yield from grouped.feed_forward(config, index, at)


def _attention(config: Config, at: str) -> Iterator[TinyTensor]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank = (config[key] for key in _RANKS)
    nope, rope, value = (config[key] for key in _DIMS)
    yield TinyTensor(f"{at}.q_a_proj.weight", (q_rank, hidden))
    yield TinyTensor(f"{at}.q_a_layernorm.weight", (q_rank,), Kind.NORM)
    yield TinyTensor(f"{at}.q_b_proj.weight", (heads * (nope + rope), q_rank))
    yield TinyTensor(f"{at}.kv_a_proj_with_mqa.weight", (kv_rank + rope, hidden))
    yield TinyTensor(f"{at}.kv_a_layernorm.weight", (kv_rank,), Kind.NORM)
    yield TinyTensor(f"{at}.kv_b_proj.weight", (heads * (nope + value), kv_rank))
    yield TinyTensor(f"{at}.o_proj.weight", (hidden, heads * value))


def _indexer(config: Config, at: str) -> Iterator[TinyTensor]:
    hidden, rank = config["hidden_size"], config["q_lora_rank"]
    heads, width = config["index_n_heads"], config["index_head_dim"]
    yield TinyTensor(f"{at}.wq_b.weight", (heads * width, rank))
    yield TinyTensor(f"{at}.wk.weight", (width, hidden))
    yield TinyTensor(f"{at}.k_norm.weight", (width,), Kind.NORM)
    yield TinyTensor(f"{at}.k_norm.bias", (width,), Kind.BIAS)
    yield TinyTensor(f"{at}.weights_proj.weight", (heads, hidden), Kind.PLAIN)


def _check(config: Config) -> None:
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    decoder.check_sizes(config, *names, "vocab_size", *_RANKS, *_DIMS)
    grouped.check_groups(config)
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    if groups != heads:
        raise ValueError(f"num_key_value_heads {groups} must be num_attention_heads {heads}")
    if config["qk_rope_head_dim"] % 2:
        raise ValueError(
            f"qk_rope_head_dim {config['qk_rope_head_dim']} is odd: rotation works on pairs"
        )


def _check_indexer(config: Config) -> None:
    _check(config)
    decoder.check_sizes(config, *_INDEXER)
    width, rope = config["index_head_dim"], config["qk_rope_head_dim"]
    if width < rope:
        raise ValueError(f"index_head_dim {width} is below qk_rope_head_dim {rope}")


DEEPSEEK_V3 = Declaration(
    {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", **_CONFIG},
    _tensors,
    _check,
)
DEEPSEEK_V32 = Declaration(
    {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        **_CONFIG,
        **_INDEXER,
    },
    _tensors,
    _check_indexer,
)
