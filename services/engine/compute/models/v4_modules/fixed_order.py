"""Elementwise functions and short sums whose result does not depend on an element's place.

PyTorch computes the last elements of a tensor in scalar code, whose exponentials differ from those
of vector code in the last bit, and it orders the terms of a sum by the shape of the whole tensor.
So a function is applied to whole vectors here, and a sum over a few terms adds them one by one.
Additions, products and quotients of single elements are exact in any code.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kernels.torch.whole_vectors import SERIAL, VECTOR


def by_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply an elementwise function to a tensor of any shape, by whole vectors on a CPU."""
    if x.device.type != "cpu":
        return function(x)
    flat = x.reshape(-1)
    missing = -len(flat) % VECTOR
    padded = functional.pad(flat, (0, missing)) if missing else flat
    parts = [function(part) for part in torch.split(padded, SERIAL)]
    whole = parts[0] if len(parts) == 1 else torch.cat(parts)
    return whole[: len(flat)].view(x.shape)


def add_up(terms: Sequence[Tensor]) -> Tensor:
    """The sum of tensors of one shape, first to last."""
    total = terms[0].clone()
    for term in terms[1:]:
        total.add_(term)
    return total


def row_sums(x: Tensor) -> Tensor:
    """Sums [...] over the last dimension of x [..., D], by halves: the order depends on D only."""
    while (width := x.shape[-1]) > 1:
        half = (width + 1) // 2
        head, tail = x[..., :half].clone(), x[..., half:]
        head[..., : width - half].add_(tail)
        x = head
    return x.squeeze(-1)


def pool(values: Tensor, scores: Tensor) -> Tensor:
    """Sum [N, D] of values [N, slots, D], weighted with the softmax of their scores over the slots.

    Scores have the shape of the values: each element of D has weights of its own. At least one of
    its scores must be finite.
    """
    best = scores.amax(1, keepdim=True)
    weights = by_vectors(torch.exp, scores - best)
    mixed = add_up((weights * values).unbind(1))
    return mixed.div_(add_up(weights.unbind(1)))
