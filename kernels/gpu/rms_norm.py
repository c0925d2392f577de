"""RMS norm in Triton: one program a row, the sum in float32 over one fixed tile."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def rms_norm_kernel(
    x, weight, out, eps, x_stride, out_stride, SIZE: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, TILE)
    inside = at < SIZE
    raw = tl.load(x + row * x_stride + at, mask=inside, other=0.0)
    wide = raw.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    gain = tl.load(weight + at, mask=inside, other=0.0)
    # Rounded to the format of x before the gain, as Hugging Face's Llama does.
    normed = (wide * scale).to(raw.dtype).to(tl.float32) * gain.to(tl.float32)
    tl.store(out + row * out_stride + at, normed.to(raw.dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See kernels.dispatch.Kernels.rms_norm; x [rows, size], its last axis contiguous."""
    if x.dim() != 2 or x.stride(1) != 1 or weight.shape != x.shape[1:]:
        raise ValueError(
            f"rms_norm: x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit"
        )
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, size = x.shape
    if rows:
        tile = triton.next_power_of_2(size)
        rms_norm_kernel[(rows,)](
            x, weight, out, eps, x.stride(0), out.stride(0), SIZE=size, TILE=tile, num_warps=4
        )
    return out
