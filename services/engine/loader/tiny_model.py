"""Writes a tiny random Llama as a Hugging Face folder: for tests and trials without a download.

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


@dataclass(frozen=True, slots=True)
class TinyShape:
    """What to vary; the rest is fixed."""

    seed: int = 0
    num_layers: int = 2
    hidden_size: int = 48
    num_heads: int = 6
    num_kv_heads: int = 2
    intermediate_size: int = 96
    max_position: int = 512
    tie_embeddings: bool = True
    llama3_rope: bool = False


def write_tiny_model(folder: Path, shape: TinyShape | None = None) -> Path:
    """Write config.json, model.safetensors, tokenizer.json and generation_config.json."""
    shape = shape or TinyShape()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _byte_tokenizer()
    vocab_size = tokenizer.get_vocab_size()
    config = _config(shape, vocab_size)
    _write_json(folder / "config.json", config)
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
    save_file(_weights(shape, vocab_size), folder / "model.safetensors", {"format": "pt"})
    return folder


def _config(shape: TinyShape, vocab_size: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
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
    hidden, middle = shape.hidden_size, shape.intermediate_size
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
            f"{at}.mlp.gate_proj.weight": (middle, hidden),
            f"{at}.mlp.up_proj.weight": (middle, hidden),
            f"{at}.mlp.down_proj.weight": (hidden, middle),
        }
    weights = {}
    for order, (name, size) in enumerate(sizes.items()):
        spread = 2.0 if "embed" in name or "head" in name else 3.0 / size[1] ** 0.5
        weights[name] = spread * _uniform(size, shape.seed * 1000 + order)
    norms = [
        f"model.layers.{index}.{norm}"
        for index in range(shape.num_layers)
        for norm in ("input_layernorm.weight", "post_attention_layernorm.weight")
    ]
    for order, name in enumerate([*norms, "model.norm.weight"]):
        weights[name] = 1 + _uniform((hidden,), shape.seed * 1000 + 500 + order) / 4
    return {name: np.asarray(value, dtype=np.float32) for name, value in weights.items()}


def _uniform(size: tuple[int, ...], key: int) -> NDArray[np.float32]:
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
