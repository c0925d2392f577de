"""Products, norm and activation in tiles of ROWS rows."""

import torch
from torch import Tensor
from torch.nn import functional

from kernels.interface import UnsupportedError
from kernels.torch.linear import pack_linear
from kernels.torch.whole_vectors import SERIAL, VECTOR

ROWS = 16
"""Rows of a tile."""


class UnequalRowsError(UnsupportedError):
    """This machine's product depends on a row's place in its tile."""


class TiledLinear:
    """See kernels.interface.Linear; every product has ROWS rows, and is checked when packed."""

    def __init__(self, weight: Tensor) -> None:
        self._out_features, self._in_features = weight.shape
        self._linear = pack_linear(weight)
        self.nbytes = self._linear.nbytes
        self._check()

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0], self._out_features)
        for at in range(0, x.shape[0], ROWS):
            rows = x[at : at + ROWS]
            out[at : at + ROWS] = self._linear(whole_tile(rows))[: rows.shape[0]]
        return out

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        residual.add_(self(x))

    def _check(self) -> None:
        """Check that a row's product depends neither on its place nor on the other rows.

        Raises:
            UnequalRowsError: it does, so this machine cannot serve `deterministic`.
        """
        count = ROWS * self._in_features
        tile = torch.arange(count, dtype=torch.float32).mul_(0.7).sin_().view(ROWS, -1)
        want = self._linear(tile)
        for shift in range(1, ROWS):
            moved = tile.roll(shift, 0)
            moved[:shift] = 0
            if not torch.equal(self._linear(moved)[shift:], want[:-shift]):
                raise UnequalRowsError(
                    f"deterministic=true: on this machine the product with a weight of "
                    f"{self._out_features} x {self._in_features} depends on a row's place in the "
                    "batch; use deterministic=false"
                )


def whole_tile(rows: Tensor) -> Tensor:
    """Copy up to ROWS rows to a tile [ROWS, columns]; its alignment is always the same."""
    missing = ROWS - rows.shape[0]
    return functional.pad(rows, (0, 0, 0, missing)) if missing else rows.clone()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See kernels.interface.Kernels.rms_norm."""
    out = torch.empty_like(x)
    for at in range(0, x.shape[0], ROWS):
        rows = x[at : at + ROWS]
        tile = whole_tile(rows)
        scale = tile.square().mean(-1, keepdim=True).add_(eps).sqrt_().reciprocal_()
        out[at : at + ROWS] = tile.mul_(scale).mul_(weight)[: rows.shape[0]]
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """See kernels.interface.Kernels.silu_mul."""
    gate, up = gate_up.chunk(2, dim=-1)
    width = gate.shape[1]
    at_once = max(1, SERIAL // width) if width % VECTOR == 0 else 1
    out = torch.empty_like(up)
    for at in range(0, gate.shape[0], at_once):
        rows = slice(at, at + at_once)
        out[rows] = functional.silu(gate[rows].contiguous()).mul_(up[rows])
    return out
