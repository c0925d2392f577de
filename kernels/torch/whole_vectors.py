"""Functions with exponentials, applied so that a row's result does not depend on other rows."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

SERIAL = 32768
"""Largest number of elements that PyTorch does not split among threads (`GRAIN_SIZE`)."""
VECTOR = 64
"""A multiple of this many elements leaves no remainder to scalar code on any vector unit."""


def by_row(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function of single elements to x [rows, width] by whole vectors.

    Scalar code, which computes what is left over, rounds differently; which elements are left over
    would depend on the number of rows. A GPU computes every element by the same code.
    """
    if x.is_cuda:
        return function(x)
    rows, width = x.shape
    padded = functional.pad(x, (0, -width % VECTOR))
    at_once = max(1, SERIAL // max(1, padded.shape[1]))
    parts = [function(padded[at : at + at_once]) for at in range(0, rows, at_once)]
    return torch.cat(parts)[:, :width] if parts else x
