"""Writes a tiny random model as a Hugging Face folder: for tests and trials without a download.

Weights come from an integer hash, so that every machine and version writes equal bytes.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

_SPECIAL = ("<s>", "</s>", "<eot>")
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
KINDS = tuple(_CLASSES)


@dataclass(frozen=True, slots=True)
class TinyShape:
    """What to vary; the rest is fixed."""

    kind: str = "llama"
    """One of KINDS."""
    seed: int = 0
    num_layers: int = 2
    hidden_size: int = 48
    num_heads: int = 6
    num_kv_heads: int = 2
    intermediate_size: int = 96
    max_position: int = 512
    tie_embeddings: bool = True
    llama3_rope: bool = False
    rope: str = ""
    """"linear" or "yarn": stretched 4 times."""
    bias: bool = False
    """Biases where the kind may have them: attention (llama, qwen3) and feed-forward (llama)."""
    sliding_window: int = 0
    """Of every layer of a mistral, and of all layers but the first of a qwen."""
    num_experts: int = 8
    """This and what follows: qwen3_moe only."""
    top_k: int = 2
    expert_size: int = 32
    norm_topk_prob: bool = True
    dense_layers: tuple[int, ...] = ()


def write_tiny_model(folder: Path, shape: TinyShape | None = None) -> Path:
    """Write config.json, model.safetensors, tokenizer.json and generation_config.json.

    Raises:
        ValueError: sizes that do not fit one another, or an unknown kind.
    """
    shape = shape or TinyShape()
    if shape.kind not in _CLASSES:
        raise ValueError(f"kind {shape.kind!r} is none of {', '.join(KINDS)}")
    if shape.hidden_size % (2 * shape.num_heads) or shape.num_heads % shape.num_kv_heads:
        raise ValueError("hidden_size must be an even multiple of heads, heads one of kv heads")
    if not 1 <= shape.top_k <= shape.num_experts:
        raise ValueError(f"top_k {shape.top_k} is not within 1 and num_experts")
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = write_text_files(folder)
    config = _config(shape, vocab_size)
    _write_json(folder / "config.json", config)
    save_file(_weights(shape, vocab_size), folder / "model.safetensors", {"format": "pt"})
    return folder


def write_text_files(folder: Path) -> int:
    """Write tokenizer.json, its configuration and generation_config.json.

    Returns:
        Size of the vocabulary: bytes, then special tokens.
    """
    tokenizer = _byte_tokenizer()
    vocab_size = tokenizer.get_vocab_size()
    _write_json(
        folder / "generation_config.json", {"eos_token_id": [vocab_size - 2, vocab_size - 1]}
    )
    _write_json(
        folder / "tokenizer_config.json",
        {
            "bos_token": _SPECIAL[0],
            "eos_token": _SPECIAL[1],
            "add_bos_token": False,
            "chat_template": "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}<eot>\n"
            "{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}",
        },
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return vocab_size


def _config(shape: TinyShape, vocab_size: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [_CLASSES[shape.kind]],
        "model_type": shape.kind,
        "vocab_size": vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": shape.tie_embeddings,
        "bos_token_id": vocab_size - 3,
        "eos_token_id": vocab_size - 2,
    }
    if shape.kind.startswith("qwen3"):
        config["head_dim"] = shape.hidden_size // shape.num_heads
    if shape.kind == "qwen3_moe":
        config |= {
            "num_experts": shape.num_experts,
            "num_experts_per_tok": shape.top_k,
            "moe_intermediate_size": shape.expert_size,
            "norm_topk_prob": shape.norm_topk_prob,
            "mlp_only_layers": list(shape.dense_layers),
            "decoder_sparse_step": 1,
        }
    return config | _variants(shape)


def _variants(shape: TinyShape) -> dict[str, Any]:
    """Keys of what few models have."""
    config: dict[str, Any] = {}
    if shape.bias:
        config["attention_bias"] = True
    if shape.bias and shape.kind == "llama":
        config["mlp_bias"] = True
    if shape.sliding_window or shape.kind == "mistral":
        config["sliding_window"] = shape.sliding_window or None
    if shape.sliding_window and shape.kind != "mistral":
        config |= {"use_sliding_window": True, "max_window_layers": 1}
    if shape.rope:
        config["rope_scaling"] = {"rope_type": shape.rope, "factor": 4.0}
        if shape.rope == "yarn":
            config["rope_scaling"]["original_max_position_embeddings"] = shape.max_position // 4
    if shape.llama3_rope:
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    return config


def _weights(shape: TinyShape, vocab_size: int) -> dict[str, NDArray[np.float32]]:
    weights = {}
    first = shape.seed * 1000
    for order, (name, size) in enumerate(_matrices(shape, vocab_size).items()):
        spread = 2.0 if "embed" in name or "head" in name else 3.0 / size[1] ** 0.5
        weights[name] = spread * uniform(size, first + order)
    for order, (name, length) in enumerate(_norms(shape).items()):
        weights[name] = 1 + uniform((length,), first + 500 + order) / 4
    for order, (name, length) in enumerate(_biases(shape).items()):
        weights[name] = uniform((length,), first + 800 + order)
    return {name: np.asarray(value, dtype=np.float32) for name, value in weights.items()}


def _matrices(shape: TinyShape, vocab_size: int) -> dict[str, tuple[int, int]]:
    hidden = shape.hidden_size
    keys = hidden // shape.num_heads * shape.num_kv_heads
    sizes = {"model.embed_tokens.weight": (vocab_size, hidden)}
    if not shape.tie_embeddings:
        sizes["lm_head.weight"] = (vocab_size, hidden)
    for index in range(shape.num_layers):
        at = f"model.layers.{index}"
        sizes |= {
            f"{at}.self_attn.q_proj.weight": (hidden, hidden),
            f"{at}.self_attn.k_proj.weight": (keys, hidden),
            f"{at}.self_attn.v_proj.weight": (keys, hidden),
            f"{at}.self_attn.o_proj.weight": (hidden, hidden),
        }
        if shape.kind == "qwen3_moe" and index not in shape.dense_layers:
            sizes[f"{at}.mlp.gate.weight"] = (shape.num_experts, hidden)
            for expert in range(shape.num_experts):
                sizes |= _mlp(f"{at}.mlp.experts.{expert}", hidden, shape.expert_size)
        else:
            sizes |= _mlp(f"{at}.mlp", hidden, shape.intermediate_size)
    return sizes


def _mlp(at: str, hidden: int, middle: int) -> dict[str, tuple[int, int]]:
    return {
        f"{at}.gate_proj.weight": (middle, hidden),
        f"{at}.up_proj.weight": (middle, hidden),
        f"{at}.down_proj.weight": (hidden, middle),
    }


def _norms(shape: TinyShape) -> dict[str, int]:
    layers = [f"model.layers.{index}" for index in range(shape.num_layers)]
    parts = ("input_layernorm", "post_attention_layernorm")
    sizes = {f"{at}.{part}.weight": shape.hidden_size for at in layers for part in parts}
    sizes["model.norm.weight"] = shape.hidden_size
    if shape.kind.startswith("qwen3"):
        head = shape.hidden_size // shape.num_heads
        sizes |= {f"{at}.self_attn.{p}_norm.weight": head for at in layers for p in "qk"}
    return sizes


def _biases(shape: TinyShape) -> dict[str, int]:
    hidden = shape.hidden_size
    keys = hidden // shape.num_heads * shape.num_kv_heads
    sizes: dict[str, int] = {}
    for index in range(shape.num_layers):
        at = f"model.layers.{index}"
        if shape.bias or shape.kind == "qwen2":
            rows = {"q": hidden, "k": keys, "v": keys}
            sizes |= {f"{at}.self_attn.{part}_proj.bias": n for part, n in rows.items()}
        if shape.bias and shape.kind != "qwen2":
            sizes[f"{at}.self_attn.o_proj.bias"] = hidden
        if shape.bias and shape.kind == "llama":
            middle = shape.intermediate_size
            rows = {"gate": middle, "up": middle, "down": hidden}
            sizes |= {f"{at}.mlp.{part}_proj.bias": n for part, n in rows.items()}
    return sizes


def uniform(size: tuple[int, ...], key: int) -> NDArray[np.float32]:
    """Values in [-1, 1) with 24 bits, by SplitMix64 over the index."""
    with np.errstate(over="ignore"):
        state = np.arange(int(np.prod(size)), dtype=np.uint64) + np.uint64(key << 32)
        state = (state + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ state >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ state >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    top = (state >> np.uint64(40)).astype(np.float32)
    return (top / np.float32(1 << 23) - np.float32(1)).reshape(size)


def _byte_tokenizer() -> Tokenizer:
    """One token a byte, then the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    return tokenizer


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
