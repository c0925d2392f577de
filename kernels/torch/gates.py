"""Gates of feed-forward networks other than plain SwiGLU, by PyTorch's operators."""

import torch
from torch import Tensor
from torch.nn import functional

from kernels.interface import Gate
from kernels.torch.whole_vectors import by_row


def gate_mul(gate_up: Tensor, gate: Gate) -> Tensor:
    """See kernels.interface.Kernels.gate_mul."""
    x, up = gate_up.chunk(2, dim=-1)
    if gate.limit is not None:
        x, up = x.clamp(max=gate.limit), up.clamp(-gate.limit, gate.limit)
    if gate.function == "gelu_tanh":
        opened = by_row(_gelu_tanh, x)
    else:
        opened = by_row(torch.sigmoid, x * gate.alpha).mul_(x)
    return opened.mul_(up + gate.up_offset if gate.up_offset else up)


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")
