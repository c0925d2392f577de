"""Norm, rotary embedding and activation with as few PyTorch operator calls as possible."""

import functools

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See kernels.interface.Kernels.rms_norm.

    In float32 these four calls take half the time of PyTorch's `rms_norm`. They use
    sqrt(mean(x^2) + eps) = hypot(|x| / sqrt(n), sqrt(eps)).
    """
    if x.dtype != torch.float32:
        if weight.dtype == torch.float32:
            return functional.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
        return functional.rms_norm(x, weight.shape, weight, eps)
    count = x.shape[-1]
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True).mul_(count**-0.5)
    return x.div(norms.hypot_(_sqrt(eps, x.device))).mul_(weight)


def rope(qk: Tensor, cos_sin: Tensor) -> None:
    """See kernels.interface.Kernels.rope; a pair is a complex number, rotated by one product."""
    by = torch.view_as_complex(cos_sin).unsqueeze(1)
    pairs = qk.view(*qk.shape[:-1], -1, 2)
    if qk.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(by)
    else:
        wide = torch.view_as_complex(pairs.float())
        pairs.copy_(torch.view_as_real(wide.mul_(by)))


def silu_mul(gate_up: Tensor) -> Tensor:
    """See kernels.interface.Kernels.silu_mul; overwrites the gate."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


@functools.cache
def _sqrt(eps: float, device: torch.device) -> Tensor:
    return torch.tensor(eps**0.5, device=device)
