"""DeepSeek V4: three kinds of attention, several residual streams, a table of experts.

Without the layer that drafts tokens. Chats have no template: DeepSeek's library renders them, and
finds this model by the tokens of its tokenizer.
"""

from collections.abc import Iterator

from services.engine.tiny_models.declaration import (
    Config,
    ControlTokens,
    Declaration,
    Kind,
    TinyTensor,
)
from services.engine.tiny_models.declarations.decoder import check_experts, check_sizes

_SPARSE, _HEAVY = 4, 128
"""Positions per entry of the two compressed kinds of layer; 0 is a layer with a window alone."""
TOKENS = ControlTokens(
    "<｜begin▁of▁sentence｜>",
    ("<｜end▁of▁sentence｜>",),
    ("<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>", "<think>", "</think>", "｜DSML｜"),
)
_CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "compress_ratios": [0, _SPARSE, _HEAVY, _SPARSE],
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 32,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 8,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "num_hash_layers": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 1.0,  # published: 10, which such small values never reach
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 256,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}
_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "moe_intermediate_size",
    "hc_mult",
    "vocab_size",
)


def _tensors(config: Config) -> Iterator[TinyTensor]:
    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    yield TinyTensor("embed.weight", (vocabulary, hidden), Kind.PLAIN)
    yield TinyTensor("norm.weight", (hidden,), Kind.NORM)
    yield TinyTensor("head.weight", (vocabulary, hidden), Kind.PLAIN)
    yield from site(config, "hc_head", config["hc_mult"], 1)
    both = config["hc_mult"] * (config["hc_mult"] + 2)
    for index in range(config["num_hidden_layers"]):
        at = f"layers.{index}"
        yield TinyTensor(f"{at}.attn_norm.weight", (hidden,), Kind.NORM)
        yield TinyTensor(f"{at}.ffn_norm.weight", (hidden,), Kind.NORM)
        yield from site(config, f"{at}.hc_attn", both, 3)
        yield from site(config, f"{at}.hc_ffn", both, 3)
        yield from _attention(config, f"{at}.attn", config["compress_ratios"][index])
        yield from _feed_forward(config, f"{at}.ffn", hashed=index < config["num_hash_layers"])


def matrix(name: str, rows: int, columns: int) -> TinyTensor:
    """The weight of a linear layer, whose scales have DeepSeek V4's names."""
    return TinyTensor(f"{name}.weight", (rows, columns), factors="{}.scale")


def site(config: Config, at: str, outputs: int, parts: int) -> Iterator[TinyTensor]:
    """The three tensors of a hyper-connection."""
    inputs = config["hc_mult"] * config["hidden_size"]
    yield TinyTensor(f"{at}_fn", (outputs, inputs), Kind.PLAIN, float32=True)
    yield TinyTensor(f"{at}_base", (outputs,), Kind.BIAS, float32=True)
    yield TinyTensor(f"{at}_scale", (parts,), Kind.NORM, float32=True)


def window_attention(config: Config, at: str) -> Iterator[TinyTensor]:
    """What every layer's attention has."""
    hidden, heads, width = (
        config[key] for key in ("hidden_size", "num_attention_heads", "head_dim")
    )
    rank, groups, wide = (config[key] for key in ("q_lora_rank", "o_groups", "o_lora_rank"))
    yield matrix(f"{at}.wq_a", rank, hidden)
    yield TinyTensor(f"{at}.q_norm.weight", (rank,), Kind.NORM)
    yield matrix(f"{at}.wq_b", heads * width, rank)
    yield matrix(f"{at}.wkv", width, hidden)
    yield TinyTensor(f"{at}.kv_norm.weight", (width,), Kind.NORM)
    yield matrix(f"{at}.wo_a", groups * wide, heads * width // groups)
    yield matrix(f"{at}.wo_b", hidden, groups * wide)
    yield TinyTensor(f"{at}.attn_sink", (heads,), Kind.BIAS, float32=True)


def _attention(config: Config, at: str, ratio: int) -> Iterator[TinyTensor]:
    yield from window_attention(config, at)
    hidden, width, rank = (config[key] for key in ("hidden_size", "head_dim", "q_lora_rank"))
    if ratio:
        yield from _compressor(hidden, f"{at}.compressor", ratio, width)
    if ratio == _SPARSE:
        index_heads, index_width = config["index_n_heads"], config["index_head_dim"]
        yield matrix(f"{at}.indexer.wq_b", index_heads * index_width, rank)
        yield TinyTensor(f"{at}.indexer.weights_proj.weight", (index_heads, hidden), Kind.PLAIN)
        yield from _compressor(hidden, f"{at}.indexer.compressor", ratio, index_width)


def _compressor(hidden: int, at: str, ratio: int, width: int) -> Iterator[TinyTensor]:
    outputs = 2 * width if ratio == _SPARSE else width
    yield TinyTensor(f"{at}.wkv.weight", (outputs, hidden), Kind.PLAIN)
    yield TinyTensor(f"{at}.wgate.weight", (outputs, hidden), Kind.PLAIN)
    yield TinyTensor(f"{at}.ape", (ratio, outputs), Kind.BIAS, float32=True)
    yield TinyTensor(f"{at}.norm.weight", (width,), Kind.NORM)


def _feed_forward(config: Config, at: str, *, hashed: bool) -> Iterator[TinyTensor]:
    hidden, experts = config["hidden_size"], config["n_routed_experts"]
    yield TinyTensor(f"{at}.gate.weight", (experts, hidden), Kind.PLAIN)
    if hashed:
        size = (config["vocab_size"], config["num_experts_per_tok"])
        yield TinyTensor(f"{at}.gate.tid2eid", size, Kind.TABLE, below=experts)
    else:
        yield TinyTensor(f"{at}.gate.bias", (experts,), Kind.BIAS, float32=True)
    yield from expert_matrices(config, at)


def expert_matrices(config: Config, at: str) -> Iterator[TinyTensor]:
    """Routed experts and the shared one."""
    hidden, middle = config["hidden_size"], config["moe_intermediate_size"]
    experts = config["n_routed_experts"]
    for part in (*(f"experts.{expert}" for expert in range(experts)), "shared_experts"):
        yield matrix(f"{at}.{part}.w1", middle, hidden)
        yield matrix(f"{at}.{part}.w2", hidden, middle)
        yield matrix(f"{at}.{part}.w3", middle, hidden)


def _check(config: Config) -> None:
    check_sizes(config, *_SIZES)
    check_experts(config, "n_routed_experts")
    layers, ratios = config["num_hidden_layers"], config["compress_ratios"]
    if type(ratios) is not list or len(ratios) < layers:
        raise ValueError(f"compress_ratios must list a ratio for each of {layers} layers: {ratios}")
    known = (0, _SPARSE, _HEAVY)
    if wrong := [ratio for ratio in ratios if type(ratio) is not int or ratio not in known]:
        raise ValueError(f"compress_ratios has {wrong[0]!r}, it may have only 0, 4 and 128")
    if not any(ratios[:layers]):
        raise ValueError(f"compress_ratios is 0 in each of {layers} layers: one must compress")
    hashed = config["num_hash_layers"]
    if type(hashed) is not int or hashed < 0:
        raise ValueError(f"num_hash_layers must be 0 or more, got {hashed!r}")
    rope, narrowest = config["qk_rope_head_dim"], min(config["head_dim"], config["index_head_dim"])
    if rope % 2 or rope > narrowest:
        raise ValueError(f"qk_rope_head_dim {rope} must be even and at most {narrowest}")
    heads, groups = config["num_attention_heads"], config["o_groups"]
    if heads % groups:
        raise ValueError(f"num_attention_heads {heads} is no multiple of o_groups {groups}")


DEEPSEEK_V4 = Declaration(_CONFIG, _tensors, _check, control_tokens=TOKENS, chat_template="")
