"""Packs a tiny model's matrices in each format that folders may have, and says what they decode to.

Numbers, scales and zero points are drawn apart and differ from row to row, group to group and block
to block, so that no two can change places unnoticed. The decoded weight is computed from them
before they are packed.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.doubles.tiny_model import TinyShape, write_tiny_model

Packed = tuple[dict[str, Tensor], Tensor]
"""The stored parts by the ending of their names, and the decoded weight in float32."""
SHAPE = TinyShape(
    kind="qwen3_moe",
    hidden_size=64,
    num_heads=4,
    intermediate_size=80,
    num_experts=4,
    expert_size=48,
    dense_layers=(0,),
)
"""Several blocks and groups in every matrix; 80 and 48 end within a block of 32."""
BLOCK, GROUP = (16, 32), 16
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@dataclass(frozen=True, slots=True)
class Packing:
    """A format: what config.json says, and how a matrix [outputs, inputs] is stored."""

    config: Mapping[str, Any]
    pack: Callable[[tuple[int, int], torch.Generator], Packed]
    scale: str
    """Ending of the name of the scales."""


def write_packed(folder: Path, packing: Packing) -> tuple[Path, dict[str, Tensor]]:
    """Write the model of SHAPE with packed matrices.

    Returns:
        The folder, and all decoded tensors.
    """
    write_tiny_model(folder, SHAPE)
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    raw["quantization_config"] = packing.config
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    draw = torch.Generator().manual_seed(7)
    stored, decoded = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored[name] = decoded[name] = tensor
        if "_proj.weight" in name:
            at = name.removesuffix(".weight")
            parts, decoded[name] = packing.pack((tensor.shape[0], tensor.shape[1]), draw)
            del stored[name]
            stored |= {f"{at}.{part}": value.contiguous() for part, value in parts.items()}
    save_file(stored, folder / "model.safetensors")
    return folder, decoded


def _scales(shape: tuple[int, ...], largest: float, draw: torch.Generator) -> Tensor:
    """Scales that bring numbers up to `largest` to about 1/4."""
    return (torch.rand(shape, generator=draw) + 0.5) / (4 * largest)


def _spread(values: Tensor, block: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """One value per element, of one per block."""
    rows, columns = torch.arange(shape[0]) // block[0], torch.arange(shape[1]) // block[1]
    return values[rows][:, columns]


def _grid(block: tuple[int, int], shape: tuple[int, int]) -> tuple[int, int]:
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def _float8(block: tuple[int, int], name: str) -> Callable[..., Packed]:
    def pack(shape: tuple[int, int], draw: torch.Generator) -> Packed:
        codes = (torch.randn(shape, generator=draw) * 8).to(torch.float8_e4m3fn)
        scales = _scales(_grid(block, shape), 16, draw)
        return {"weight": codes, name: scales}, codes.float() * _spread(scales, block, shape)

    return pack


def _float4(shape: tuple[int, int], draw: torch.Generator) -> Packed:
    """Two e2m1 in a byte, the even one below; powers of two per 32 inputs (DeepSeek V4)."""
    codes = torch.randint(0, 16, shape, generator=draw, dtype=torch.uint8)
    exponents = torch.randint(120, 124, _grid((1, 32), shape), generator=draw, dtype=torch.uint8)
    numbers = _E2M1[(codes & 7).long()] * torch.where(codes >= 8, -1.0, 1.0)
    decoded = numbers * _spread(2.0 ** (exponents.float() - 127), (1, 32), shape)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    scales = exponents.view(torch.float8_e8m0fnu)
    return {"weight": packed.view(torch.int8), "scale": scales}, decoded


def _int8(shape: tuple[int, int], draw: torch.Generator) -> Packed:
    numbers = torch.randint(-128, 128, shape, generator=draw, dtype=torch.int8)
    scales = _scales((shape[0], 1), 128, draw)
    return {"weight": numbers, "weight_scale": scales}, numbers.float() * scales


def _words(numbers: Tensor, dim: int, places: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight numbers of 4 bits in a word along `dim`; `places` holds the place of each of 8."""
    short = -numbers.shape[dim] % 8
    padded = torch.nn.functional.pad(numbers, (0, short) if dim == 1 else (0, 0, 0, short))
    each = padded.unfold(dim, 8, 8).long()
    words = sum(each[..., index] << 4 * place for index, place in enumerate(places))
    assert isinstance(words, Tensor)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def _four_bits(
    shape: tuple[int, int], draw: torch.Generator, groups: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Numbers [outputs, inputs], zero points and scales [outputs, groups], and the weight."""
    count = int(groups.max()) + 1
    numbers = torch.randint(0, 16, shape, generator=draw)
    zeros = torch.randint(1, 15, (shape[0], count), generator=draw)
    scales = _scales((shape[0], count), 8, draw).half()
    decoded = (numbers - zeros[:, groups]).float() * scales.float()[:, groups]
    return numbers, zeros, scales, decoded


def _gptq(shape: tuple[int, int], draw: torch.Generator) -> Packed:
    """Act order: the groups of the inputs are shuffled. Version 1 stores zero points less 1."""
    groups = (torch.arange(shape[1]) // GROUP)[torch.randperm(shape[1], generator=draw)]
    numbers, zeros, scales, decoded = _four_bits(shape, draw, groups)
    parts = {"qweight": _words(numbers.T, 0), "qzeros": _words(zeros.T - 1, 1)}
    return parts | {"scales": scales.T, "g_idx": groups.int()}, decoded


def _awq(shape: tuple[int, int], draw: torch.Generator) -> Packed:
    groups = torch.arange(shape[1]) // GROUP
    numbers, zeros, scales, decoded = _four_bits(shape, draw, groups)
    places = (0, 4, 1, 5, 2, 6, 3, 7)
    parts = {"qweight": _words(numbers.T, 1, places), "qzeros": _words(zeros.T, 1, places)}
    return parts | {"scales": scales.T}, decoded


def _pack4(shape: tuple[int, int], draw: torch.Generator) -> Packed:
    groups = torch.arange(shape[1]) // GROUP
    numbers, zeros, scales, decoded = _four_bits(shape, draw, groups)
    parts = {"weight_packed": _words(numbers, 1), "weight_zero_point": _words(zeros, 0)}
    return parts | {"weight_scale": scales, "weight_shape": torch.tensor(shape)}, decoded


def _compressed(form: str, **weights: object) -> Mapping[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }


_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
_BITS4 = {"bits": 4, "group_size": GROUP}
PACKINGS: Mapping[str, Packing] = {
    "fp8_blocks": Packing(_FP8, _float8(BLOCK, "weight_scale_inv"), "weight_scale_inv"),
    "fp8_rows": Packing(
        _compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        _float8((1, 1 << 20), "weight_scale"),
        "weight_scale",
    ),
    "float4": Packing(_FP8, _float4, "scale"),
    "int8": Packing(
        _compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
        _int8,
        "weight_scale",
    ),
    "pack4": Packing(
        _compressed(
            "pack-quantized",
            num_bits=4,
            type="int",
            strategy="group",
            group_size=GROUP,
            symmetric=False,
        ),
        _pack4,
        "weight_scale",
    ),
    "awq": Packing({"quant_method": "awq", "version": "gemm", **_BITS4}, _awq, "scales"),
    "gptq": Packing({"quant_method": "gptq", "desc_act": True, **_BITS4}, _gptq, "scales"),
}
"""By format."""
