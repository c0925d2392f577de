"""Writes a random checkpoint of Qwen3-MoE's shape for the comparison: no download, any machine.

    python -m benchmarks.bench_engine.random_experts --out /tmp/moe --gguf
    python -m benchmarks.bench_engine --model /tmp/moe --dtypes float32 bfloat16 int8 --threads 2

The default shape has about 1.1 billion parameters, of which a token uses 0.26 billion: 9 layers
with 64 experts, 8 of them per token. Weights are bfloat16, one file per layer, so that memory holds
one layer. The tokenizer is our default model's. Speed does not depend on the values, but on how
evenly the router spreads rows: random weights spread them about evenly.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import gguf
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.engine.compute.loader import load_model

INDEX = "model.safetensors.index.json"
GGUF_NAME = "model.BF16.gguf"
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "model.norm.weight": "output_norm.weight",
}
_PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
}


@dataclass(frozen=True)
class Shape:
    """Sizes in elements."""

    layers: int = 9
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 4
    dim: int = 128
    experts: int = 64
    top_k: int = 8
    expert_size: int = 512


def write_folder(folder: Path, shape: Shape, seed: int = 0) -> int:
    """Write config.json, the tokenizer, and one safetensors file per layer.

    Returns:
        The number of parameters.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = load_model("").text
    vocab = load_model("").config.vocab_size
    (folder / "tokenizer.json").write_bytes(text.tokenizer_json)
    tokens = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": text.chat_template}
    _write_json(folder / "tokenizer_config.json", tokens | dict(text.special_tokens))
    _write_json(folder / "config.json", _config(shape, vocab))
    draw = torch.Generator().manual_seed(seed)
    places: dict[str, str] = {}
    count = size = 0
    for index in range(shape.layers + 1):
        top = index == shape.layers
        tensors = _top(shape, vocab, draw) if top else _layer(shape, index, draw)
        name = f"model-{index + 1:05}-of-{shape.layers + 1:05}.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        places |= dict.fromkeys(tensors, name)
        count += sum(tensor.numel() for tensor in tensors.values())
        size += sum(tensor.nbytes for tensor in tensors.values())
    _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": places})
    return count


def write_gguf(folder: Path) -> Path:
    """Write the folder's model as a GGUF file in bfloat16, from which llama.cpp makes others."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    path = folder / GGUF_NAME
    writer = gguf.GGUFWriter(path, "qwen3moe", use_temp_file=True)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    _add_tokens(writer, folder)
    places = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
    for name in dict.fromkeys(places.values()):
        for key, tensor in _gguf_tensors(load_file(folder / name), config["num_experts"]).items():
            _add_tensor(writer, key, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _config(shape: Shape, vocab: int) -> dict:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": 3 * shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.dim,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "moe_intermediate_size": shape.expert_size,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }


def _layer(shape: Shape, index: int, draw: torch.Generator) -> dict[str, Tensor]:
    at, hidden, size = f"model.layers.{index}", shape.hidden, shape.expert_size
    queries, keys = shape.heads * shape.dim, shape.kv_heads * shape.dim
    tensors = {
        f"{at}.input_layernorm.weight": _ones(hidden),
        f"{at}.post_attention_layernorm.weight": _ones(hidden),
        f"{at}.self_attn.q_norm.weight": _ones(shape.dim),
        f"{at}.self_attn.k_norm.weight": _ones(shape.dim),
        f"{at}.self_attn.q_proj.weight": _random(draw, queries, hidden),
        f"{at}.self_attn.k_proj.weight": _random(draw, keys, hidden),
        f"{at}.self_attn.v_proj.weight": _random(draw, keys, hidden),
        f"{at}.self_attn.o_proj.weight": _random(draw, hidden, queries),
        f"{at}.mlp.gate.weight": _random(draw, shape.experts, hidden),
    }
    for expert in range(shape.experts):
        own = f"{at}.mlp.experts.{expert}"
        tensors[f"{own}.gate_proj.weight"] = _random(draw, size, hidden)
        tensors[f"{own}.up_proj.weight"] = _random(draw, size, hidden)
        tensors[f"{own}.down_proj.weight"] = _random(draw, hidden, size)
    return tensors


def _top(shape: Shape, vocab: int, draw: torch.Generator) -> dict[str, Tensor]:
    return {
        "model.embed_tokens.weight": _random(draw, vocab, shape.hidden),
        "model.norm.weight": _ones(shape.hidden),
        "lm_head.weight": _random(draw, vocab, shape.hidden),
    }


def _random(draw: torch.Generator, rows: int, columns: int) -> Tensor:
    return (torch.randn(rows, columns, generator=draw) / columns**0.5).bfloat16()


def _ones(count: int) -> Tensor:
    return torch.ones(count, dtype=torch.bfloat16)


def _gguf_tensors(tensors: dict[str, Tensor], experts: int) -> dict[str, Tensor]:
    """Tensors of one file by their names in GGUF; those of a layer's experts as one."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in _TOP:
            found[_TOP[name]] = tensor
            continue
        _, _, layer, rest = name.split(".", 3)
        part = rest.removesuffix(".weight")
        if part in _PARTS:
            found[f"blk.{layer}.{_PARTS[part]}.weight"] = tensor
        elif part.startswith("mlp.experts.0."):
            side = part.rsplit(".", 1)[1].removesuffix("_proj")
            at = f"model.layers.{layer}.mlp.experts"
            stack = [tensors[f"{at}.{expert}.{side}_proj.weight"] for expert in range(experts)]
            found[f"blk.{layer}.ffn_{side}_exps.weight"] = torch.stack(stack)
    return found


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: Tensor) -> None:
    # Norms and routers stay float32 in every format of llama.cpp.
    if tensor.dim() == 1 or "gate_inp" in name:
        writer.add_tensor(name, tensor.float().numpy())
        return
    raw = tensor.contiguous().view(torch.uint8).numpy()
    writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)


def _add_tokens(writer: gguf.GGUFWriter, folder: Path) -> None:
    spec = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["content"]: token["id"] for token in spec["added_tokens"]}
    vocab = dict(spec["model"]["vocab"]) | special
    tokens = sorted(vocab, key=lambda token: int(vocab[token]))
    merges = spec["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_eos_token_id(2)


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Write the checkpoint; print its size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder, made if needed")
    parser.add_argument("--gguf", action="store_true", help=f"also {GGUF_NAME}, for llama.cpp")
    parser.add_argument("--seed", type=int, default=0)
    for name, value in vars(Shape()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    options = parser.parse_args()
    shape = Shape(**{name: getattr(options, name) for name in vars(Shape())})
    count = write_folder(options.out, shape, options.seed)
    print(f"{count / 1e6:.0f} million parameters in {options.out}")
    if options.gguf:
        print(f"written to {write_gguf(options.out)}")


if __name__ == "__main__":
    main()
