"""Norm, rotation, activation and dense products with as few operator calls as torch allows."""

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See kernels.dispatch.Kernels.rms_norm."""
    return functional.rms_norm(x, weight.shape, weight, eps)


def rope(qk: Tensor, turns: Tensor) -> None:
    """Rotate pairs in place: a pair is a complex number, so one multiplication does it."""
    by = torch.view_as_complex(turns).unsqueeze(1)
    pairs = qk.view(*qk.shape[:-1], -1, 2)
    if qk.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(by)
    else:
        wide = torch.view_as_complex(pairs.float())
        pairs.copy_(torch.view_as_real(wide.mul_(by)))


def silu_mul(gate_up: Tensor) -> Tensor:
    """See kernels.dispatch.Kernels.silu_mul; overwrites the gate."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
