"""RMS norm in Triton: one program per row; the sum runs in float32 over one fixed tile."""

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
    normed = wide * scale
    if gain.dtype != tl.float32:
        # Rounded to the format of x before the multiplication by the weight, as in transformers.
        normed = normed.to(raw.dtype).to(tl.float32)
    normed = normed * gain.to(tl.float32)
    tl.store(out + row * out_stride + at, normed.to(raw.dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See kernels.interface.Kernels.rms_norm; the norm is over x's last axis."""
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: weight {tuple(weight.shape)} must have the last size of x {tuple(x.shape)}"
        )
    size = x.shape[-1]
    flat = x.reshape(-1, size)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    out = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    if len(flat):
        tile = triton.next_power_of_2(size)
        rms_norm_kernel[(len(flat),)](
            flat, weight, out, eps, flat.stride(0), size, SIZE=size, TILE=tile, num_warps=4
        )
    return out.view(x.shape)
