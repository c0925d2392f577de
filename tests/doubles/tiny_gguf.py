"""Writes a folder's model as one GGUF file: for tests and trials of that format.

Only for what `tiny_model` writes: a vocabulary of bytes and few special tokens, stored as float32
or in a format that the gguf package packs.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from services.engine.compute.loader import ModelSource, load_model
from services.engine.compute.loader.gguf_weights import LAYER_NAMES, TOP_NAMES
from services.engine.contract.model_config import ModelFileError, YarnRope
from services.engine.model_files.gguf_config import ARCHITECTURES
from tests.doubles.tiny_model import TinyShape

_NAMES = {ours: theirs for theirs, ours in ARCHITECTURES.items()} | {"mistral": "llama"}
_EXPERTS = "mlp.experts."


def check_packing(shape: TinyShape, kind: str) -> None:
    """Check whether the tables of a shape can be stored in a format, before anything is written.

    Raises:
        ValueError: naming the size that is no multiple of the format's block, or the format.
    """
    stored = gguf.GGMLQuantizationType.__members__.get(kind)
    if stored is None:
        raise ValueError(f"gguf {kind!r} is no format of GGUF tables")
    block, _bytes = gguf.GGML_QUANT_SIZES[stored]
    names = ["hidden_size", "expert_size" if shape.kind == "qwen3_moe" else "intermediate_size"]
    for name in names:
        size = getattr(shape, name)
        if size % block:
            raise ValueError(f"{name} must be a multiple of {block} for {kind}, got {size}")
    try:
        gguf.quants.quantize(np.zeros((1, block), np.float32), stored)
    except NotImplementedError as error:
        raise ValueError(f"gguf {kind!r} cannot be packed by the gguf package") from error


def write_gguf(folder: Path, path: Path, kind: str = "F32") -> Path:
    """Write the model of a folder.

    Args:
        kind: format of tables, e.g. "Q8_0"; rows must be whole blocks of it.

    Raises:
        ModelFileError: a model that the format, or this writer, has no keys for.
    """
    source = load_model(str(folder))
    config = source.config
    if config.rope_scaling and not isinstance(config.rope_scaling, YarnRope):
        raise ModelFileError("of scaled rotary frequencies only yarn is written")
    writer = gguf.GGUFWriter(path, _NAMES[config.architecture])
    _add_config(writer, source)
    _add_tokens(writer, source)
    turned = _NAMES[config.architecture] == "llama"
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads} if turned else {}
    for name, tensor in _stacked(source).items():
        part = name.split(".")[-2]
        values = _permute(tensor, heads[part]) if part in heads else tensor
        _add_tensor(writer, _gguf_name(name), values, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_config(writer: gguf.GGUFWriter, source: ModelSource) -> None:
    config = source.config
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.head_dim)
    if config.sliding_layers:
        writer.add_sliding_window(config.sliding_window)
    if isinstance(config.rope_scaling, YarnRope):
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_scaling.factor)
        writer.add_rope_scaling_orig_ctx_len(config.rope_scaling.original_max_position)
    if config.moe:
        writer.add_expert_count(config.moe.num_experts)
        writer.add_expert_used_count(config.moe.top_k)
        writer.add_expert_feed_forward_length(config.moe.intermediate_size)


def _add_tokens(writer: gguf.GGUFWriter, source: ModelSource) -> None:
    spec: dict[str, Any] = json.loads(source.text.tokenizer_json)
    vocab = dict(spec["model"]["vocab"])
    special = {token["content"]: token["id"] for token in spec["added_tokens"]}
    vocab |= special
    tokens = sorted(vocab, key=lambda token: int(vocab[token]))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([])
    writer.add_bos_token_id(special["<s>"])
    writer.add_eos_token_id(source.eos_token_ids[0])
    writer.add_eot_token_id(source.eos_token_ids[-1])
    writer.add_add_bos_token(False)
    writer.add_chat_template(source.text.chat_template)


def _stacked(source: ModelSource) -> dict[str, NDArray[np.float32]]:
    """Tensors by name; those of a layer's experts as one."""
    tensors: dict[str, Any] = {}
    stacks: dict[str, dict[int, NDArray[np.float32]]] = {}
    for name, tensor in source.weights.items():
        if _EXPERTS in name:
            at, rest = name.split(_EXPERTS)
            number, part = rest.split(".", 1)
            stacks.setdefault(f"{at}mlp.exps.{part}", {})[int(number)] = tensor.numpy()
        else:
            tensors[name] = tensor.numpy()
    for name, experts in stacks.items():
        tensors[name] = np.stack([experts[number] for number in sorted(experts)])
    return tensors


def _gguf_name(name: str) -> str:
    top = {ours: theirs for theirs, ours in TOP_NAMES.items()}
    if name in top:
        return top[name]
    _, _, layer, *middle, kind = name.split(".")
    if middle[:2] == ["mlp", "exps"]:
        return f"blk.{layer}.ffn_{middle[2].removesuffix('_proj')}_exps.{kind}"
    parts = {ours: theirs for theirs, ours in LAYER_NAMES.items()}
    return f"blk.{layer}.{parts['.'.join(middle)]}.{kind}"


def _add_tensor(writer: gguf.GGUFWriter, name: str, values: NDArray[np.float32], kind: str) -> None:
    values = np.ascontiguousarray(values)
    stored = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
    writer.add_tensor(name, gguf.quants.quantize(values, stored), raw_dtype=stored)


def _permute(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """From rotary halves (Hugging Face) to interleaved pairs (GGUF)."""
    shape = weight.shape
    halves = weight.reshape(heads, 2, shape[0] // heads // 2, *shape[1:])
    return halves.swapaxes(1, 2).reshape(shape)
