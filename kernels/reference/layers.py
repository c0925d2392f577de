"""Norm, rotary embedding, activation and product as in their papers, in float32."""

import math

import torch
from torch import Tensor

from kernels.interface import Gate


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich 2019, eq. 4)."""
    wide = x.float()
    scale = (wide.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    if weight.dtype == torch.float32:
        return (wide * scale * weight).to(x.dtype)
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


def gate_mul(gate_up: Tensor, gate: Gate) -> Tensor:
    """See kernels.interface.Kernels.gate_mul; GELU's tanh form: Hendrycks and Gimpel 2016."""
    x, up = gate_up.chunk(2, dim=-1)
    if gate.limit is not None:
        x, up = x.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
    if gate.function == "gelu_tanh":
        opened = x / 2 * (1 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)))
    else:
        opened = x * torch.sigmoid(gate.alpha * x)
    return opened * (up + gate.up_offset)


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
