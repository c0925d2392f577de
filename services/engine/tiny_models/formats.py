"""The formats in which a tiny model's weights can be stored."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.engine.tiny_models.declaration import Kind, TinyTensor
from services.engine.tiny_models.float8 import LARGEST, bfloat16_bits, e4m3_codes

BLOCK = 128
"""Rows and columns that share a scale in FP8 checkpoints."""
_BYTES = {"I64": 8, "F32": 4, "BF16": 2, "F8_E4M3": 1}


@dataclass(frozen=True, slots=True)
class Stored:
    """One entry of a safetensors file."""

    name: str
    dtype: str
    """As safetensors spells it."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return _BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Format:
    """How tensors are stored; a tensor may become several entries."""

    config: Mapping[str, Any]
    """Keys of config.json."""
    entries: Callable[[TinyTensor], list[Stored]]
    encode: Callable[[TinyTensor, NDArray[np.float32]], list[NDArray[Any]]]
    """The data of the entries, in their order."""


def _float32_entries(tensor: TinyTensor) -> list[Stored]:
    whole = tensor.kind is Kind.TABLE
    return [Stored(tensor.name, "I64" if whole else "F32", tensor.shape)]


def _float32(tensor: TinyTensor, values: NDArray[np.float32]) -> list[NDArray[Any]]:
    return [values.astype(np.int64) if tensor.kind is Kind.TABLE else values]


def _bfloat16_entries(tensor: TinyTensor) -> list[Stored]:
    if tensor.float32 or tensor.kind is Kind.TABLE:
        return _float32_entries(tensor)
    return [Stored(tensor.name, "BF16", tensor.shape)]


def _bfloat16(tensor: TinyTensor, values: NDArray[np.float32]) -> list[NDArray[Any]]:
    if tensor.float32 or tensor.kind is Kind.TABLE:
        return _float32(tensor, values)
    return [bfloat16_bits(values)]


def _fp8_entries(tensor: TinyTensor) -> list[Stored]:
    if tensor.kind is not Kind.MATRIX:
        return _bfloat16_entries(tensor)
    rows, columns = tensor.shape
    scales = (-(-rows // BLOCK), -(-columns // BLOCK))
    return [
        Stored(tensor.name, "F8_E4M3", tensor.shape),
        Stored(tensor.factors.format(tensor.name.removesuffix(".weight")), "F32", scales),
    ]


def _fp8(tensor: TinyTensor, values: NDArray[np.float32]) -> list[NDArray[Any]]:
    """Codes, and for each block of 128 x 128 the factor that brings them back."""
    if tensor.kind is not Kind.MATRIX:
        return _bfloat16(tensor, values)
    codes = np.empty(values.shape, np.uint8)
    scales = np.empty(_fp8_entries(tensor)[1].shape, np.float32)
    for row, column in np.ndindex(scales.shape):
        block = np.s_[
            row * BLOCK : (row + 1) * BLOCK,
            column * BLOCK : (column + 1) * BLOCK,
        ]
        scales[row, column] = np.abs(values[block]).max() / np.float32(LARGEST) or 1.0
        codes[block] = e4m3_codes(values[block] / scales[row, column])
    return [codes, scales]


FORMATS: Mapping[str, Format] = {
    "float32": Format({"torch_dtype": "float32"}, _float32_entries, _float32),
    "bfloat16": Format({"torch_dtype": "bfloat16"}, _bfloat16_entries, _bfloat16),
    "fp8": Format(
        {
            "torch_dtype": "bfloat16",
            "quantization_config": {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [BLOCK, BLOCK],
            },
        },
        _fp8_entries,
        _fp8,
    ),
}
"""By the name that the tool takes. fp8: the matrices of linear layers in FP8 with block scales, all
else in bfloat16."""
