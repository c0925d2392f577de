"""Gated activation in Triton: silu(gate) * up."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024


@triton.jit
def silu_mul_kernel(gate_up, out, SIZE: tl.constexpr, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < SIZE
    gate = tl.load(gate_up + row * (2 * SIZE) + at, mask=inside, other=0.0)
    up = tl.load(gate_up + row * (2 * SIZE) + SIZE + at, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * SIZE + at, (active * up.to(tl.float32)).to(gate.dtype), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """See kernels.interface.Kernels.silu_mul; gate_up [rows, 2 * size], contiguous."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or not gate_up.is_contiguous():
        raise ValueError(f"silu_mul: expected contiguous [T, 2 F], got {tuple(gate_up.shape)}")
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        silu_mul_kernel[(rows, triton.cdiv(size, _TILE))](gate_up, out, SIZE=size, TILE=_TILE)
    return out
