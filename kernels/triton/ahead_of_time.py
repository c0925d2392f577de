"""Compiles every Triton kernel for a GPU that this machine need not have.

Run as `python -m kernels.triton.ahead_of_time`. It proves that the kernels compile for the target,
and prints the size of each cubin. A kernel is specialised on its shapes; those of SmolLM2-135M are
used.
"""

import argparse
import os
import sys
from typing import Any, NamedTuple


class Variant(NamedTuple):
    """One kernel with the types and constants to compile it for."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, int]
    warps: int = 4
    stages: int = 3


def variants(element: str) -> list[Variant]:
    """All kernels for one element type: "fp32", "bf16" or "fp16"."""
    from kernels.triton import kv_write, paged_attention, rms_norm, rope, sample, silu_mul

    x, f, i = f"*{element}", "*fp32", "i32"
    attention = {"KV_HEADS": 3, "GROUP": 3, "DIM": 64, "BLOCK": 32, "ROWS": 16, "DIM_TILE": 64}
    return [
        Variant(
            "rms_norm",
            rms_norm.rms_norm_kernel,
            {"x": x, "weight": x, "out": x, "eps": "fp32", "x_stride": i, "out_stride": i},
            {"SIZE": 576, "TILE": 1024},
        ),
        Variant(
            "rope",
            rope.rope_kernel,
            {"qk": x, "cos_sin": f, "row_stride": i, "head_stride": i},
            {"HEADS": 12, "HALF": 32, "HEAD_TILE": 16, "HALF_TILE": 32},
        ),
        Variant(
            "kv_write",
            kv_write.kv_write_kernel,
            {"cache": x, "kv": x, "slots": "*i64", "row_stride": i, "head_stride": i},
            {"HEADS": 6, "DIM": 64, "HEAD_TILE": 8, "DIM_TILE": 64},
        ),
        Variant(
            "silu_mul",
            silu_mul.silu_mul_kernel,
            {"gate_up": x, "out": x},
            {"SIZE": 1536, "TILE": 1024},
        ),
        Variant(
            "attend_split",
            paged_attention.attend_split_kernel,
            {"q": x, "cache": x, "tables": "*i64", "lengths": "*i32", "out": f, "peak": f}
            | {"total": f, "scale": "fp32", "table_stride": i},
            attention | {"SPLIT": paged_attention.SPLIT, "TILE": paged_attention.TILE},
        ),
        Variant(
            "combine_splits",
            paged_attention.combine_splits_kernel,
            {"out": f, "peak": f, "total": f, "lengths": "*i32", "combined": x, "num_splits": i},
            {"HEADS": 9, "DIM": 64, "DIM_TILE": 64, "SPLIT": paged_attention.SPLIT},
        ),
        Variant(
            "sample_tile",
            sample.sample_tile_kernel,
            {"scores": f, "keys": "*i32", "best": f, "where": "*i32", "row_stride": i}
            | {"num_tiles": i},
            {"SIZE": 49152, "TILE": sample.TILE},
        ),
        Variant(
            "sample_row",
            sample.sample_row_kernel,
            {"best": f, "where": "*i32", "out": "*i64", "num_tiles": i},
            {"TILES": 64},
        ),
    ]


def compile_for(capability: int, element: str) -> dict[str, int]:
    """Compile all kernels.

    Args:
        capability: 80, 90, 100: compute capability times ten.
        element: "fp32", "bf16" or "fp16".

    Returns:
        Bytes of machine code, by kernel.
    """
    return {
        variant.name: len(compile_variant(variant, capability).asm["cubin"])
        for variant in variants(element)
    }


def compile_variant(variant: Variant, capability: int) -> Any:
    """Compile a kernel as a launch does: memory begins at multiples of 16 bytes.

    Args:
        capability: see `compile_for`.

    Returns:
        Triton's compiled kernel.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = variant.kernel
    signature = variant.types | dict.fromkeys(variant.constants, "constexpr")
    signature = {name: signature[name] for name in kernel.arg_names}
    aligned = {
        (at,): [["tt.divisibility", 16]]
        for at, kind in enumerate(signature.values())
        if kind.startswith("*")
    }
    source = ASTSource(kernel, signature, constexprs=variant.constants, attrs=aligned)
    options = {"num_warps": variant.warps, "num_stages": variant.stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def main() -> int:
    """Print name, target, element type and size of each kernel."""
    parser = argparse.ArgumentParser(prog="kernels.triton.ahead_of_time", description=__doc__)
    parser.add_argument("--target", default="sm_90", help="sm_80, sm_90 or sm_100")
    parser.add_argument("--element", default="bf16", choices=("fp32", "bf16", "fp16"))
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1":
        print(
            "TRITON_INTERPRET=1 is set, so nothing would be compiled: unset it and run again",
            file=sys.stderr,
        )
        return 2
    for name, size in compile_for(int(args.target.removeprefix("sm_")), args.element).items():
        print(f"{name:<14} {args.target} {args.element} {size:>8} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
