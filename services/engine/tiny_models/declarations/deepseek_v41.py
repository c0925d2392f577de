"""The text model of DeepSeek V4.1: compressed entries that layers share, look-ups by n-gram.

Six layers have every kind: a window alone, a source of entries of two positions and a layer that
borrows them, a source of entries of one position, a layer that borrows, and one that chooses among
the candidates of the source. Without images and without the layers that draft tokens.
"""

from collections.abc import Iterator

from tokenizers import Tokenizer

from services.engine.model_files.deepseek_v41 import deepseek_v41_config
from services.engine.model_files.engram import engram_tables
from services.engine.model_files.engram_ids import compressed_ids
from services.engine.model_files.json_keys import Keys
from services.engine.tiny_models.declaration import (
    Config,
    ControlTokens,
    Declaration,
    Kind,
    TinyTensor,
)
from services.engine.tiny_models.declarations.decoder import check_sizes
from services.engine.tiny_models.declarations.deepseek_v4 import (
    DEEPSEEK_V4,
    TOKENS,
    expert_matrices,
    matrix,
    site,
    window_attention,
)

_TOKENS = ControlTokens(TOKENS.begin, TOKENS.ends, ("<｜System｜>", *TOKENS.others))
_LIKE_V4 = (
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "sliding_window",
    "index_n_heads",
    "index_topk",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "scoring_func",
    "topk_method",
    "norm_topk_prob",
    "routed_scaling_factor",
    "swiglu_limit",
    "hc_mult",
    "hc_sinkhorn_iters",
    "hc_eps",
    "rope_theta",
    "compress_rope_theta",
    "rope_scaling",
    "max_position_embeddings",
    "num_nextn_predict_layers",
    "hidden_act",
    "attention_bias",
    "tie_word_embeddings",
)
_CONFIG = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    **{key: DEEPSEEK_V4.config[key] for key in _LIKE_V4},
    "num_hidden_layers": 6,
    "compress_ratios": [0, 2, 2, 1, 1, 1],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 5],
    "candidate_source_layer_id": 3,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 4,
    "index_head_dim": 32,  # a multiple of the block of index keys, or they would not be rounded
    "gate_temp": 1,
    "rms_norm_eps": 1e-20,
    "engram_layer_ids": [1, 4],
    "engram_vocab_size": 120,
    "engram_max_ngram_size": 4,
    "engram_n_heads": 2,
    "engram_head_dim": 8,
    "engram_pad_token_id": 2,
}


def _derive(config: Config, tokenizer: Tokenizer) -> Config:
    """How many compressed ids the tokenizer has, and the rows of the tables."""
    check_sizes(config, "num_hidden_layers", "vocab_size", "moe_intermediate_size")
    check_sizes(config, "engram_vocab_size", "engram_max_ngram_size", "engram_n_heads")
    layers = config["engram_layer_ids"]
    if type(layers) is not list or any(type(layer) is not int or layer < 0 for layer in layers):
        raise ValueError(f"engram_layer_ids must list layers, got {layers!r}")
    num_ids = len(set(compressed_ids(tokenizer)))
    tables = engram_tables(
        layers,
        start=config["engram_vocab_size"],
        longest=config["engram_max_ngram_size"],
        heads=config["engram_n_heads"],
        num_ids=num_ids,
    )
    return {
        "engram_num_embeddings": [table.num_rows for table in tables],
        "engram_compressed_vocab_size": num_ids,
    }


def _check(config: Config) -> None:
    """By the engine's own reader, as most keys depend on others."""
    read = deepseek_v41_config(Keys(dict(config), "config.json"))
    if read.engram.head_dim < 1:
        raise ValueError("engram_head_dim must be a positive integer, got 0")


def _tensors(config: Config) -> Iterator[TinyTensor]:
    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    yield TinyTensor("embed.weight", (vocabulary, hidden), Kind.PLAIN)
    yield TinyTensor("norm.weight", (hidden,), Kind.NORM)
    yield TinyTensor("head.weight", (vocabulary, hidden), Kind.PLAIN)
    rows = dict(zip(config["engram_layer_ids"], config["engram_num_embeddings"], strict=True))
    both = config["hc_mult"] * (config["hc_mult"] + 2)
    for index in range(config["num_hidden_layers"]):
        at = f"layers.{index}"
        if index in rows:
            yield from _engram(config, f"{at}.engram", rows[index])
        yield TinyTensor(f"{at}.attn_norm.weight", (hidden,), Kind.NORM)
        yield TinyTensor(f"{at}.ffn_norm.weight", (hidden,), Kind.NORM)
        yield from site(config, f"{at}.hc_attn", both, 3)
        yield from site(config, f"{at}.hc_ffn", both, 3)
        yield from window_attention(config, f"{at}.attn")
        yield from _history(config, f"{at}.attn", index)
        yield from _feed_forward(config, f"{at}.ffn")


def _engram(config: Config, at: str, rows: int) -> Iterator[TinyTensor]:
    hidden, streams, width = (config[key] for key in ("hidden_size", "hc_mult", "engram_head_dim"))
    found = (config["engram_max_ngram_size"] - 1) * config["engram_n_heads"] * width
    yield TinyTensor(f"{at}.embed.weight", (rows, width), Kind.PLAIN)
    yield matrix(f"{at}.wkv", (streams + 1) * hidden, found)
    yield TinyTensor(f"{at}.q_weight", (streams, hidden), Kind.NORM)
    yield TinyTensor(f"{at}.k_weight", (streams, hidden), Kind.NORM)


def _history(config: Config, at: str, index: int) -> Iterator[TinyTensor]:
    """What makes compressed entries, and what chooses among them."""
    hidden, width, index_width = (
        config[key] for key in ("hidden_size", "head_dim", "index_head_dim")
    )
    if index in config["kv_source_layer_ids"]:
        yield TinyTensor(f"{at}.compressor.wkv.weight", (width, hidden), Kind.PLAIN)
        if config["compress_ratios"][index] > 1:
            yield TinyTensor(f"{at}.compressor.wgate.weight", (width, hidden), Kind.PLAIN)
        yield TinyTensor(f"{at}.compressor.norm.weight", (width,), Kind.NORM)
        yield matrix(f"{at}.indexer.wk", index_width, width)
        yield TinyTensor(f"{at}.indexer.k_norm.weight", (index_width,), Kind.NORM)
    if index in config["index_source_layer_ids"]:
        heads = config["index_n_heads"]
        yield matrix(f"{at}.indexer.wq_b", heads * index_width, config["q_lora_rank"])
        yield TinyTensor(f"{at}.indexer.weights_proj.weight", (heads, hidden), Kind.PLAIN)


def _feed_forward(config: Config, at: str) -> Iterator[TinyTensor]:
    experts = config["n_routed_experts"]
    yield TinyTensor(f"{at}.gate.weight", (experts, config["hidden_size"]), Kind.PLAIN)
    for name in ("bias", "bias_vl"):  # of text, and of images
        yield TinyTensor(f"{at}.gate.{name}", (experts,), Kind.BIAS, float32=True)
    yield from expert_matrices(config, at)


DEEPSEEK_V41 = Declaration(
    _CONFIG,
    _tensors,
    _check,
    control_tokens=_TOKENS,
    derive=_derive,
    text_part="text_config",
    chat_template="",
)
