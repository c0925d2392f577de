"""The two products of the experts, each in one launch over all tiles of all experts.

A program multiplies the rows of one tile with a part of its expert's weight. Rows of gate and up
alternate in the first weight, so that a program has both for its columns and opens the gate before
it stores. GROUP_TILES tiles take turns at each part of the columns: those of one expert find its
weights in the cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.interface import Gate
from kernels.triton.experts.align import GROUP_TILES, Aligned
from kernels.triton.experts.tiles import Tiles
from kernels.triton.interpreted import INTERPRETED
from kernels.triton.products.accumulate import accumulate, is_packed
from kernels.triton.products.gates import FUNCTIONS, open_gate
from kernels.triton.products.operands import Weight, check_rows, operand
from kernels.triton.products.rounding import round_to


@triton.jit
def grouped_kernel(
    x, weight, scales, zeros, bias, out, order, begins, counts, tile_experts, tile_begins, limit,
    alpha, offset,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, FORMAT: tl.constexpr, SCALED: tl.constexpr,
    TOP_K: tl.constexpr, HAS_BIAS: tl.constexpr, GATED: tl.constexpr, FUNCTION: tl.constexpr,
    HAS_LIMIT: tl.constexpr, GROUP: tl.constexpr, ROW_TILE: tl.constexpr,
    COLUMN_TILE: tl.constexpr, DEPTH_TILE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    # Tile and columns of this program: a group's tiles first, then the next columns.
    program = tl.program_id(0)
    of_group = GROUP * tl.cdiv(COLUMNS, COLUMN_TILE)
    tile = program // of_group * GROUP + program % GROUP
    part = program % of_group // GROUP
    expert = tl.load(tile_experts + tile).to(tl.int64)
    if expert < 0:
        return
    position = tl.load(tile_begins + tile) + tl.arange(0, ROW_TILE)
    row_inside = position < tl.load(begins + expert) + tl.load(counts + expert)
    pair = tl.load(order + position, mask=row_inside, other=0).to(tl.int64)
    column = part * COLUMN_TILE + tl.arange(0, COLUMN_TILE)
    column_inside = column < COLUMNS
    # The first product reads rows of x and writes them sorted; the second turns that round.
    source = pair // TOP_K if GATED else position.to(tl.int64)
    WIDTH: tl.constexpr = DEPTH // 2 if is_packed(FORMAT) else DEPTH
    GROUPS: tl.constexpr = (DEPTH + SCALED - 1) // SCALED
    first = expert * COLUMNS
    total = accumulate(
        x + source * DEPTH, row_inside, weight + first * WIDTH, scales + first * GROUPS,
        zeros + first * GROUPS, column.to(tl.int64), column_inside,
        DEPTH, DEPTH_TILE, FORMAT, SCALED, WIDE, ROW_TILE, COLUMN_TILE,
    )  # fmt: skip
    if HAS_BIAS:
        own = tl.load(bias + first + column, mask=column_inside, other=0.0)
        total += own.to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(total, (ROW_TILE, COLUMN_TILE // 2, 2)))
        opened = open_gate(gate, up, limit, alpha, offset, FUNCTION, HAS_LIMIT)
        place = part * (COLUMN_TILE // 2) + tl.arange(0, COLUMN_TILE // 2)
        where = position.to(tl.int64)[:, None] * (COLUMNS // 2) + place[None, :]
        inside = row_inside[:, None] & (place < COLUMNS // 2)[None, :]
        tl.store(out + where, round_to(opened, out.dtype.element_ty), mask=inside)
    else:
        inside = row_inside[:, None] & column_inside[None, :]
        where = pair[:, None] * COLUMNS + column[None, :]
        tl.store(out + where, round_to(total, out.dtype.element_ty), mask=inside)


def gate_up_product(
    x: Tensor, weight: Weight, bias: Tensor | None, gate: Gate, aligned: Aligned, top_k: int,
    tiles: Tiles,
) -> Tensor:  # fmt: skip
    """Rows of x [T, N] times their experts' weight [E, 2 F, N], and the gate.

    Args:
        weight: rows of gate and up alternate; as do those of `bias` [E, 2 F].

    Returns:
        [T * k, F] in the order of `aligned`.

    Raises:
        ValueError: a shape, format, stride or device does not fit.
    """
    if len(x) * top_k != len(aligned.order):
        raise ValueError(
            f"gate_up: {len(x)} rows of {top_k} do not make {len(aligned.order)} chosen rows"
        )
    return _launch("gate_up", x, weight, bias, aligned, top_k, tiles, gate)


def down_product(
    x: Tensor, weight: Weight, bias: Tensor | None, aligned: Aligned, tiles: Tiles
) -> Tensor:
    """Rows of x [pairs, F] in the order of `aligned` times their experts' weight [E, N, F].

    Returns:
        [pairs, N] in the order of pairs; rows of pairs without an expert are not written.

    Raises:
        ValueError: a shape, format, stride or device does not fit.
    """
    if len(x) != len(aligned.order):
        raise ValueError(f"down: there are {len(x)} rows, but {len(aligned.order)} chosen ones")
    return _launch("down", x, weight, bias, aligned, 1, tiles, None)


def _launch(
    name: str, x: Tensor, weight: Weight, bias: Tensor | None, aligned: Aligned, top_k: int,
    tiles: Tiles, gate: Gate | None,
) -> Tensor:  # fmt: skip
    own = operand(weight)
    check_rows(name, x, own)
    _check(name, x, own.shape, bias, aligned, tiles)
    _experts, columns, depth = own.shape
    width = columns if gate is None else columns // 2
    out = torch.empty(len(aligned.order), width, dtype=x.dtype, device=x.device)
    if not len(aligned.order):
        return out
    opened = gate or Gate()
    grid = (len(aligned.tile_experts) * triton.cdiv(columns, tiles.columns),)
    grouped_kernel[grid](
        x, own.numbers, own.scales, own.zeros, x if bias is None else bias, out, aligned.order,
        aligned.begins, aligned.counts, aligned.tile_experts, aligned.tile_begins,
        opened.limit or 0.0, opened.alpha, opened.up_offset, COLUMNS=columns, DEPTH=depth,
        FORMAT=own.format, SCALED=own.group, TOP_K=top_k, HAS_BIAS=bias is not None,
        GATED=gate is not None, FUNCTION=FUNCTIONS[opened.function],
        HAS_LIMIT=opened.limit is not None, GROUP=GROUP_TILES, ROW_TILE=tiles.rows,
        COLUMN_TILE=tiles.columns, DEPTH_TILE=own.depth_tile(tiles.depth), WIDE=INTERPRETED,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


def _check(
    name: str, x: Tensor, shape: tuple[int, ...], bias: Tensor | None, aligned: Aligned,
    tiles: Tiles,
) -> None:  # fmt: skip
    if len(shape) != 3 or not x.is_contiguous():
        raise ValueError(
            f"{name}: weights {shape} must be [E, out, in], rows contiguous; their strides are "
            f"{x.stride()}"
        )
    if aligned.rows != tiles.rows or aligned.order.device != x.device:
        raise ValueError(
            f"{name}: rows on {x.device} in tiles of {tiles.rows} are aligned to {aligned.rows} on "
            f"{aligned.order.device}"
        )
    if bias is not None and (
        tuple(bias.shape) != shape[:2] or bias.device != x.device or not bias.is_contiguous()
    ):
        raise ValueError(
            f"{name}: bias must be contiguous {shape[:2]} on {x.device}, got {tuple(bias.shape)} "
            f"on {bias.device}"
        )
