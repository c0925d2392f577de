"""Write tests/data/formats_golden.safetensors: quantised weights, and what the tools that pack them
decode them to.

    pip install --no-deps compressed-tensors==0.20.1 loguru psutil pydantic
    PYTHONPATH=AUTOAWQ:AUTO_GPTQ python scripts/make_formats_golden.py

AUTOAWQ and AUTO_GPTQ are the unpacked sources of autoawq 0.2.9 and auto-gptq 0.7.1: their packages
ask for versions of torch that are not ours, and the modules used here need none of them.
transformers 5.24 decodes FP8 and MXFP4. Tensors are CASE/NAME; the reference is CASE/expected.
"""

import importlib.util
import sys
import types
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch
from compressed_tensors.compressors.naive_quantized.base import (
    FloatQuantizationCompressor,
    IntQuantizationCompressor,
)
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

OUT = Path(__file__).parents[1] / "tests" / "data" / "formats_golden.safetensors"
ROWS, COLUMNS = 32, 64
Case = dict[str, Tensor]


def main() -> None:
    """Write the file."""
    torch.manual_seed(7)
    tensors = {}
    for name, make in CASES.items():
        tensors |= {f"{name}/{part}": value.contiguous() for part, value in make().items()}
    packages = ("torch", "transformers", "compressed-tensors")
    save_file(tensors, OUT, {package: version(package) for package in packages})
    print(f"{OUT.stat().st_size} bytes, {len(CASES)} cases")


def _float8(shape: tuple[int, ...], block: tuple[int, int], scale: Tensor, name: str) -> Case:
    weight = torch.randn(shape).mul_(100).to(torch.float8_e4m3fn)
    expected = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32)
    return {"weight": weight, name: scale, "expected": expected}


def _blocks(*grid: int) -> Tensor:
    return torch.rand(grid) / 100 + 1e-4


def _exponents(*grid: int) -> Tensor:
    return torch.randint(110, 140, grid, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def _float4_rows() -> Case:
    packed = torch.randint(-128, 128, (ROWS, COLUMNS // 2), dtype=torch.int8)
    scale = _exponents(ROWS, COLUMNS // 32)
    expected = Fp8Dequantize(None)._dequantize_one(packed, scale, torch.float32)
    return {"weight": packed, "scale": scale, "expected": expected}


def _mxfp4() -> Case:
    blocks = torch.randint(0, 256, (3, 8, 2, 16), dtype=torch.uint8)
    scales = torch.randint(100, 150, (3, 8, 2), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return {"blocks": blocks, "scales": scales, "expected": expected}


def _compressed(compressor: type, columns: int, grid: tuple[int, ...], **arguments: object) -> Case:
    """A weight that the library quantises, packs and unpacks."""
    args = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state = {"weight": torch.randn(ROWS, columns), "weight_scale": torch.rand(grid) / 4 + 0.05}
    if not args.symmetric:
        low, high = -(1 << args.num_bits - 1), 1 << args.num_bits - 1
        state["weight_zero_point"] = torch.randint(low, high, grid, dtype=torch.int8)
    packed = compressor.compress(state, scheme)
    expected = compressor.decompress(packed, scheme)["weight"]
    return {**packed, "expected": expected}


def _act_order() -> Case:
    """Packed by the library; this version of it has no decoder for g_idx."""
    case = _compressed(
        PackedQuantizationCompressor,
        COLUMNS,
        (ROWS, 4),
        num_bits=4,
        strategy="group",
        group_size=16,
    )
    numbers = torch.randint(-8, 8, (ROWS, COLUMNS), dtype=torch.int8)
    groups = torch.arange(COLUMNS, dtype=torch.int32)[torch.randperm(COLUMNS)] // 16
    expected = numbers.float() * case["weight_scale"].float()[:, groups.long()]
    packed = pack_to_int32(numbers, 4)
    return {**case, "weight_packed": packed, "weight_g_idx": groups, "expected": expected}


@cache
def _skip_init(*packages: str) -> None:
    """Make the modules of packages importable without what their __init__.py imports."""
    for name in packages:
        spec = importlib.util.find_spec(name)
        if spec is None:
            raise SystemExit(f"{name} is not on PYTHONPATH; see the head of this file")
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = list(spec.submodule_search_locations or ())


def _awq() -> Case:
    _skip_init("awq", "awq.utils")
    from awq.utils.packing_utils import dequantize_gemm

    qweight, qzeros = _words(COLUMNS, ROWS // 8), _words(COLUMNS // 16, ROWS // 8)
    scales = (torch.rand(COLUMNS // 16, ROWS) / 100 + 0.01).half()
    expected = dequantize_gemm(qweight, qzeros, scales.float(), 4, 16)
    return {"qweight": qweight, "qzeros": qzeros, "scales": scales, "expected": expected.t()}


def _words(*shape: int) -> Tensor:
    return torch.randint(-(1 << 31), 1 << 31, shape).to(torch.int32)


def _gptq(bits: int, *, ordered: bool) -> Case:
    _skip_init("auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear")
    from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear

    layer = QuantLinear(bits, 16, COLUMNS, ROWS, bias=False)
    groups = torch.arange(COLUMNS, dtype=torch.int32) // 16
    if ordered:
        groups = groups[torch.randperm(COLUMNS)]
    scales = (torch.rand(ROWS, COLUMNS // 16) / 100 + 0.01).half()
    zeros = torch.randint(1, 1 << bits, scales.shape).float()
    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    layer.pack(linear.half(), scales, zeros, groups)
    layer.qweight = _words(*layer.qweight.shape)
    parts = {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales.half()}
    layer.scales = layer.scales.float()
    expected = layer(torch.eye(COLUMNS)).t()
    return {**parts, "g_idx": groups, "expected": expected}


GROUPS = {"strategy": "group", "group_size": 16}
CASES: dict[str, Callable[[], Case]] = {
    "fp8_block": lambda: _float8((ROWS, COLUMNS), (16, 32), _blocks(2, 2), "weight_scale_inv"),
    "fp8_exponents": lambda: _float8((ROWS, COLUMNS), (16, 32), _exponents(2, 2), "scale"),
    "fp8_stack": lambda: _float8((3, 16, 32), (8, 16), _blocks(3, 2, 2), "weight_scale_inv"),
    "fp8_tensor": lambda: _float8((ROWS, COLUMNS), (1, 1), _blocks(1), "weight_scale"),
    "float4_rows": _float4_rows,
    "mxfp4": _mxfp4,
    "ct_fp8_tensor": lambda: _compressed(
        FloatQuantizationCompressor, COLUMNS, (1,), num_bits=8, type="float", strategy="tensor"
    ),
    "ct_fp8_channel": lambda: _compressed(
        FloatQuantizationCompressor,
        COLUMNS,
        (ROWS, 1),
        num_bits=8,
        type="float",
        strategy="channel",
    ),
    "ct_fp8_block": lambda: _compressed(
        FloatQuantizationCompressor,
        COLUMNS,
        (2, 4),
        num_bits=8,
        type="float",
        strategy="block",
        block_structure=[16, 16],
    ),
    "ct_int8_channel": lambda: _compressed(
        IntQuantizationCompressor, COLUMNS, (ROWS, 1), num_bits=8, strategy="channel"
    ),
    "ct_int8_zeros": lambda: _compressed(
        IntQuantizationCompressor, COLUMNS, (ROWS, 4), num_bits=8, symmetric=False, **GROUPS
    ),
    "ct_pack4": lambda: _compressed(
        PackedQuantizationCompressor, COLUMNS, (ROWS, 4), num_bits=4, **GROUPS
    ),
    "ct_pack4_zeros": lambda: _compressed(
        PackedQuantizationCompressor, COLUMNS, (ROWS, 4), num_bits=4, symmetric=False, **GROUPS
    ),
    "ct_pack8_odd": lambda: _compressed(
        PackedQuantizationCompressor, COLUMNS - 2, (ROWS, 1), num_bits=8, strategy="channel"
    ),
    "ct_pack4_order": _act_order,
    "awq": _awq,
    "gptq4_order": lambda: _gptq(4, ordered=True),
    "gptq8": lambda: _gptq(8, ordered=False),
}

if __name__ == "__main__":
    main()
