"""The tensors of a GGUF file under Hugging Face's names, decoded one at a time."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from services.engine.compute.loader.progress import ReadTensors
from services.engine.compute.models.expert_weights import expert_names
from services.engine.compute.models.rows import ByteRows, DenseRows, Rows
from services.engine.compute.models.weights import StoredWeights
from services.engine.contract.model_config import ModelConfig, ModelFileError
from services.engine.model_files.file_errors import naming_file
from services.engine.model_files.gguf_header import GgufHeader, TensorInfo

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_GEMMA3_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERT_PARTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_FLOATS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies: part of the configuration, not a weight."""


class GgufWeights(StoredWeights):
    """See StoredWeights; the file stays mapped while this object exists."""

    def __init__(self, path: Path, header: GgufHeader, config: ModelConfig) -> None:
        """Find the model's tensor for each tensor of the file.

        Raises:
            ModelFileError: a tensor has no counterpart, its format is not supported, or the file
                ends within it.
        """
        self._data: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
        self._path = path
        self._heads: dict[str, int] = {}
        # There GGUF stores norms around 1, not around 0 as the model's own files do.
        self._norm_offset = 1.0 if config.architecture == "gemma3" else 0.0
        layer_names = LAYER_NAMES | (_GEMMA3_NAMES if config.architecture == "gemma3" else {})
        self._infos: dict[str, TensorInfo] = {}
        for name, info in header.tensors.items():
            if name == ROPE_FACTORS:
                continue
            check_format(name, info)
            raw_bytes(self._data, name, info)
            self._infos |= _counterparts(name, info, layer_names)
        if config.architecture == "llama":  # Only there does GGUF reorder rotary pairs.
            self._heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        sizes = {name: stored_bytes(info) for name, info in self._infos.items()}
        self._reads = ReadTensors(path.name, sizes)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.part(name, 0, 1)

    def part(self, name: str, index: int, count: int) -> torch.Tensor:
        """See StoredWeights; no other part is read."""
        info = self._infos[name]
        if len(info.shape) < 2:
            whole = self._decoded(name, info)
            return whole if count == 1 else whole.chunk(count)[index]
        size = -(-info.shape[0] // count)
        rows = max(0, min(size, info.shape[0] - index * size))
        row_bytes = stored_bytes(replace(info, shape=info.shape[1:]))
        shape, offset = (rows, *info.shape[1:]), info.offset + index * size * row_bytes
        return self._decoded(name, replace(info, shape=shape, offset=offset), count)

    def _decoded(self, name: str, info: TensorInfo, count: int = 1) -> torch.Tensor:
        """Decode a tensor, or a range of rows that is one of `count` parts of it."""
        self._reads.count(name)
        with naming_file(self._path):
            tensor = decode_tensor(self._data, name, info)
        part = name.split(".")[-2]
        if part in self._heads:
            heads = self._heads[part] // count
            return _unpermute(tensor.view(len(tensor), -1), heads).view(tensor.shape)
        if self._norm_offset and part.endswith("norm"):
            return tensor.sub_(self._norm_offset)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._infos  # Mapping's own would decode the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without decoding it."""
        return self._infos[name].shape

    def skip(self, names: Iterable[str]) -> None:
        """See StoredWeights."""
        self._reads.skip(names)

    def where(self, name: str) -> Path | None:
        """See StoredWeights."""
        return self._path if name in self._infos else None

    def rows(self, name: str, dtype: torch.dtype) -> Rows:
        """See StoredWeights; Q8_0 tables keep the file's blocks."""
        info = self._infos[name]
        kind = GGMLQuantizationType(info.ggml_type)
        if kind == GGMLQuantizationType.Q8_0:
            size = GGML_QUANT_SIZES[kind][1]
            blocks = raw_bytes(self._data, name, info).reshape(info.shape[0], -1, size)
            scales = torch.from_numpy(blocks[..., :2].copy()).view(torch.float16)
            quantized = torch.from_numpy(blocks[..., 2:].copy()).view(torch.int8)
            return ByteRows(scales, quantized, dtype)
        return DenseRows(self[name].to(dtype))


def check_format(name: str, info: TensorInfo) -> None:
    """Check that a tensor's format can be decoded and fits its shape.

    Raises:
        ModelFileError: it cannot, or does not.
    """
    try:
        kind = GGMLQuantizationType(info.ggml_type)
    except ValueError:
        raise ModelFileError(
            f"tensor {name!r}: number format {info.ggml_type} is unknown"
        ) from None
    block, size = GGML_QUANT_SIZES[kind]
    if not info.shape or info.shape[-1] % block:
        raise ModelFileError(
            f"tensor {name!r}: rows of shape {info.shape} are not a whole number of {kind.name} "
            f"blocks of {block}"
        )
    if kind == GGMLQuantizationType.F32:
        return
    try:
        dequantize(np.zeros((1, size), np.uint8), kind)
    except NotImplementedError:
        raise ModelFileError(
            f"tensor {name!r}: number format {kind.name} is not supported; convert "
            "the model to another one"
        ) from None


def stored_bytes(info: TensorInfo) -> int:
    """Bytes of a tensor in the file."""
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(info.ggml_type)]
    return math.prod(info.shape) // block * block_bytes


def raw_bytes(data: NDArray[np.uint8], name: str, info: TensorInfo) -> NDArray[np.uint8]:
    """The bytes of a tensor.

    Args:
        data: the bytes of the whole file.

    Raises:
        ModelFileError: the file ends within the tensor.
    """
    size = stored_bytes(info)
    raw = data[info.offset : info.offset + size]
    if raw.size != size:
        raise ModelFileError(f"the file ends within tensor {name!r}: download it again")
    return raw


def decode_tensor(data: NDArray[np.uint8], name: str, info: TensorInfo) -> torch.Tensor:
    """Decode a tensor to float32.

    Args:
        data: the bytes of the whole file.

    Raises:
        ModelFileError: its format is not supported, or the file ends within the tensor.
    """
    check_format(name, info)
    kind = GGMLQuantizationType(info.ggml_type)
    raw = raw_bytes(data, name, info)
    if kind in _FLOATS:
        numbers = torch.from_numpy(raw.copy()).view(_FLOATS[kind])
        return numbers.float().view(info.shape)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    values = dequantize(raw.reshape(-1, info.shape[-1] // block * block_bytes), kind)
    if not np.isfinite(values).all():
        raise ModelFileError(
            f"tensor {name!r}: a scale is not a finite number: download the file again"
        )
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32).reshape(info.shape))


def _counterparts(
    name: str, info: TensorInfo, layer_names: Mapping[str, str]
) -> Mapping[str, TensorInfo]:
    """The model's tensors for a tensor of the file; a stack of experts becomes one per expert.

    Raises:
        ModelFileError: there are none.
    """
    if name in TOP_NAMES:
        return {TOP_NAMES[name]: info}
    prefix, layer, part, kind, *_ = (*name.split("."), "", "", "")
    if prefix == "blk" and layer.isdecimal() and kind in ("weight", "bias"):
        if part in _EXPERT_PARTS and kind == "weight" and len(info.shape) == 3:
            return _experts(int(layer), _EXPERT_PARTS.index(part), info)
        if part in layer_names:
            return {f"model.layers.{layer}.{layer_names[part]}.{kind}": info}
    raise ModelFileError(f"tensor {name!r} is not part of a served architecture")


def _experts(layer: int, part: int, info: TensorInfo) -> Mapping[str, TensorInfo]:
    shape = info.shape[1:]
    size = stored_bytes(replace(info, shape=shape))
    return {
        expert_names(layer, expert)[part]: replace(
            info, shape=shape, offset=info.offset + expert * size
        )
        for expert in range(info.shape[0])
    }


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder interleaved rotary pairs (GGUF) to halves (Hugging Face)."""
    rows, columns = weight.shape
    pairs = weight.view(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)
