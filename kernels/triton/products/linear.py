"""Dense products in Triton: weights in 8 or 4 bits, and weights whose product is batch-invariant.

One tile for every number of rows, and one program for the whole depth: a row's bits depend neither
on the other rows nor on their number. cuBLAS (torch) chooses its algorithm by the number of rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.experts.tiles import INVARIANT, Tiles
from kernels.triton.interpreted import INTERPRETED
from kernels.triton.products.accumulate import accumulate
from kernels.triton.products.operands import Weight, check_rows, operand
from kernels.triton.products.rounding import round_to

_FLOAT32 = Tiles(64, 64, 32, 4, 2)
_GROUP = 8  # tiles of rows that share their part of the weight in the cache


@triton.jit
def linear_kernel(
    x, weight, scales, zeros, out, rows, x_stride,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, FORMAT: tl.constexpr, SCALED: tl.constexpr,
    ADD: tl.constexpr, GROUP: tl.constexpr, ROW_TILE: tl.constexpr, COLUMN_TILE: tl.constexpr,
    DEPTH_TILE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    of_group = GROUP * tl.cdiv(COLUMNS, COLUMN_TILE)
    tile = program // of_group * GROUP + program % GROUP
    row = tile * ROW_TILE + tl.arange(0, ROW_TILE)
    if tile * ROW_TILE >= rows:
        return
    row_inside = row < rows
    row = row.to(tl.int64)
    column = program % of_group // GROUP * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
    column_inside = column < COLUMNS
    total = accumulate(
        x + row * x_stride, row_inside, weight, scales, zeros, column.to(tl.int64), column_inside,
        DEPTH, DEPTH_TILE, FORMAT, SCALED, WIDE, ROW_TILE, COLUMN_TILE,
    )  # fmt: skip
    where = out + row[:, None] * COLUMNS + column[None, :]
    inside = row_inside[:, None] & column_inside[None, :]
    if ADD:
        # Rounded before it is added, as a product on its own is.
        product = round_to(total, out.dtype.element_ty).to(tl.float32)
        total = tl.load(where, mask=inside, other=0.0).to(tl.float32) + product
    tl.store(where, round_to(total, out.dtype.element_ty), mask=inside)


class TritonLinear:
    """See kernels.interface.Linear; the weight is plain or in codes."""

    def __init__(self, weight: Weight) -> None:
        self._weight = weight
        self._operand = operand(weight)
        if len(self._operand.shape) != 2:
            raise ValueError(f"linear: weight {self._operand.shape} must be [out, in]")

    @property
    def nbytes(self) -> int:
        """See Linear."""
        return self._weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """See Linear."""
        out = torch.empty(len(x), self._operand.shape[0], dtype=x.dtype, device=x.device)
        self._launch(x, out, add=False)
        return out

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """See Linear."""
        wanted = (len(x), self._operand.shape[0])
        if residual.shape != wanted or not residual.is_contiguous() or residual.dtype != x.dtype:
            raise ValueError(
                f"linear: residual must be contiguous {x.dtype} {wanted}, got {residual.dtype} "
                f"{tuple(residual.shape)}"
            )
        self._launch(x, residual, add=True)

    def _launch(self, x: Tensor, out: Tensor, *, add: bool) -> None:
        own = self._operand
        check_rows("linear", x, own)
        if not len(x):
            return
        tiles = _FLOAT32 if x.dtype == torch.float32 else INVARIANT
        columns, depth = own.shape
        row_tiles = triton.cdiv(triton.cdiv(len(x), tiles.rows), _GROUP) * _GROUP
        linear_kernel[(row_tiles * triton.cdiv(columns, tiles.columns),)](
            x, own.numbers, own.scales, own.zeros, out, len(x), x.stride(0), COLUMNS=columns,
            DEPTH=depth, FORMAT=own.format, SCALED=own.group, ADD=add, GROUP=_GROUP,
            ROW_TILE=tiles.rows, COLUMN_TILE=tiles.columns, DEPTH_TILE=own.depth_tile(tiles.depth),
            WIDE=INTERPRETED, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip


def pack_invariant(weight: Tensor) -> TritonLinear:
    """See kernels.interface.Kernels.pack: a product whose rows do not depend on one another."""
    return TritonLinear(weight.contiguous())
