"""Models from one GGUF file: quantised blocks are decoded to float32 at load."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from services.engine.loader.gguf_header import GgufHeader, TensorInfo, read_header
from services.engine.loader.gguf_text import text_assets
from services.engine.loader.source import ModelSource, file_digest
from services.engine.models.config import ModelConfig, ModelFileError, RopeScaling

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


def load_gguf(path: Path, name: str) -> ModelSource:
    """Read a whole model.

    Raises:
        ModelFileError: another architecture than llama, or a tensor that cannot be decoded.
    """
    header = read_header(path)
    config = _config(header, path)
    weights = _weights(path, header, config)
    kinds = sorted({GGMLQuantizationType(t.ggml_type).name for t in header.tensors.values()})
    quantised = [kind for kind in kinds if kind not in ("F32", "F16", "BF16")]
    return ModelSource(
        name=name,
        config=config,
        weights=weights,
        text=text_assets(header.metadata),
        eos_token_ids=_eos(header.metadata),
        revision=file_digest([path]),
        quantisation="+".join(quantised) or "none",
    )


def _config(header: GgufHeader, path: Path) -> ModelConfig:
    meta = header.metadata
    if meta.get("general.architecture") != "llama":
        found = meta.get("general.architecture")
        raise ModelFileError(f"{path}: architecture {found!r} is not supported, only 'llama'")
    try:
        heads = meta["llama.attention.head_count"]
        hidden = meta["llama.embedding_length"]
        return ModelConfig(
            architecture="llama",
            vocab_size=header.tensors["token_embd.weight"].shape[0],
            hidden_size=hidden,
            num_layers=meta["llama.block_count"],
            num_heads=heads,
            num_kv_heads=meta.get("llama.attention.head_count_kv", heads),
            head_dim=meta.get("llama.attention.key_length", hidden // heads),
            intermediate_size=meta["llama.feed_forward_length"],
            rms_norm_eps=_short(meta["llama.attention.layer_norm_rms_epsilon"]),
            rope_theta=float(meta.get("llama.rope.freq_base", 10000.0)),
            max_position=meta["llama.context_length"],
            tie_embeddings="output.weight" not in header.tensors,
            rope_scaling=_scaling(header, path),
        )
    except KeyError as error:
        raise ModelFileError(f"{path}: {error} is missing") from error


def _short(value: float) -> float:
    """The decimal that was meant: GGUF keeps 1e-5 as the nearest float32."""
    return float(f"{value:.7g}")


def _scaling(header: GgufHeader, path: Path) -> RopeScaling | None:
    kind = header.metadata.get("llama.rope.scaling.type", "none")
    if kind not in ("none", "") or "rope_freqs.weight" in header.tensors:
        raise ModelFileError(
            f"{path}: scaled rotary frequencies are not read from GGUF files: "
            "use the model's Hugging Face folder instead"
        )
    return None


def _eos(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return tuple(dict.fromkeys(metadata[key] for key in keys if key in metadata))


def _weights(path: Path, header: GgufHeader, config: ModelConfig) -> dict[str, torch.Tensor]:
    data = np.memmap(path, dtype=np.uint8, mode="r")
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    weights = {}
    for name, info in header.tensors.items():
        tensor = decode_tensor(data, name, info)
        part = name.split(".")[2] if name.startswith("blk.") else ""
        if part in heads:
            tensor = _unpermute(tensor, heads[part])
        weights[_hf_name(name)] = tensor
    return weights


def _hf_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    prefix, layer, part, *rest = (*name.split("."), "", "")
    if prefix != "blk" or part not in _LAYER_NAMES or rest[0] != "weight":
        raise ModelFileError(f"tensor {name!r} has no place in a Llama model")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"


def decode_tensor(data: NDArray[np.uint8], name: str, info: TensorInfo) -> torch.Tensor:
    """One tensor, out of the bytes of its whole file, as float32.

    Raises:
        ModelFileError: its format is unknown, or the bytes end within it.
    """
    kind = GGMLQuantizationType(info.ggml_type)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    count = int(np.prod(info.shape))
    size = count // block * block_bytes
    raw = data[info.offset : info.offset + size]
    if raw.size != size:
        raise ModelFileError(f"the file ends within tensor {name!r}")
    if kind == GGMLQuantizationType.F32:
        values = raw.view(np.float32)
    else:
        row_bytes = info.shape[-1] // block * block_bytes
        try:
            values = dequantize(raw.reshape(-1, row_bytes), kind)
        except NotImplementedError as error:
            raise ModelFileError(f"tensor {name!r}: format {kind.name} is not decoded") from error
    return torch.from_numpy(np.array(values, dtype=np.float32).reshape(info.shape))


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """From interleaved rotary pairs (GGUF) to halves (Hugging Face)."""
    rows, columns = weight.shape
    pairs = weight.view(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)
