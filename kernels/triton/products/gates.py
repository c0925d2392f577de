"""Gates of feed-forward networks: f(gate) * (up + offset), see kernels.interface.Gate."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.interface import Gate
from kernels.triton.products.rounding import round_to

FUNCTIONS = {"silu": 0, "gelu_tanh": 1}
_GELU = tl.constexpr(1)
_TILE = 1024


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) of float32; no intermediate value is infinite."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x < 0, small, 1.0) / (1.0 + small)


@triton.jit
def open_gate(gate, up, limit, alpha, offset, FUNCTION: tl.constexpr, HAS_LIMIT: tl.constexpr):
    """The opened gate, of float32; tanh(u) is 2 * sigmoid(2 u) - 1, so GELU is x * sigmoid(2 u)."""
    if HAS_LIMIT:
        # Not minimum and maximum: a NaN must stay one.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    if FUNCTION == _GELU:
        turned = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    else:
        turned = alpha * gate
    return gate * sigmoid(turned) * (up + offset)


@triton.jit
def gate_mul_kernel(
    gate_up, out, limit, alpha, offset, SIZE: tl.constexpr, FUNCTION: tl.constexpr,
    HAS_LIMIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < SIZE
    gate = tl.load(gate_up + row * (2 * SIZE) + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * SIZE) + SIZE + at, mask=inside, other=0.0).to(tl.float32)
    opened = open_gate(gate, up, limit, alpha, offset, FUNCTION, HAS_LIMIT)
    tl.store(out + row * SIZE + at, round_to(opened, out.dtype.element_ty), mask=inside)


def gate_mul(gate_up: Tensor, gate: Gate) -> Tensor:
    """See kernels.interface.Kernels.gate_mul; computed in float32, gate_up is contiguous.

    Raises:
        ValueError: gate_up is not contiguous [T, 2 F].
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or not gate_up.is_contiguous():
        raise ValueError(f"gate_mul: expected contiguous [T, 2 F], got {tuple(gate_up.shape)}")
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        gate_mul_kernel[(rows, triton.cdiv(size, _TILE))](
            gate_up, out, gate.limit or 0.0, gate.alpha, gate.up_offset, SIZE=size,
            FUNCTION=FUNCTIONS[gate.function], HAS_LIMIT=gate.limit is not None, TILE=_TILE,
        )  # fmt: skip
    return out
