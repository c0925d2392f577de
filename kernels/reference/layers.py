"""Norm, rotary embedding, activation and product as in their papers, in float32."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich 2019, eq. 4)."""
    wide = x.float()
    scale = (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale).to(x.dtype) * weight


def rope(qk: Tensor, cos_sin: Tensor) -> None:
    """Rotate each pair (2i, 2i + 1) of a head by its angle, in place (Su et al. 2021, eq. 34)."""
    cos, sin = cos_sin[:, None, :, 0], cos_sin[:, None, :, 1]
    even, odd = qk[..., 0::2].float(), qk[..., 1::2].float()
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    qk.copy_(rotated.flatten(-2))


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate * sigmoid(gate) * up; the row holds gate, then up (Shazeer 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


class PlainLinear:
    """See kernels.interface.Linear: y = x W^T."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self._weight.T

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        residual += self(x)

    @property
    def nbytes(self) -> int:
        return self._weight.nbytes
