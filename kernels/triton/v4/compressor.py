"""Compressed entries of DeepSeek V4: made of the rows of several positions, which rings keep."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.checks import FLOATS, check
from kernels.triton.v4.places import check_rings, load_angles, load_places, place_row, rotate
from kernels.v4 import Entries, Rings

TILE = 8
"""Positions of one step."""
KEPT = 1024
"""Elements that one program copies."""


@triton.jit
def _add_positions(
    peak, total, mixed, rows, ring, first, last, first_row, begin, slot, offset, at,
    DIM: tl.constexpr, WIDTH: tl.constexpr, RING: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Join positions first to last - 1, weighted per element: [DIM_TILE] each."""
    for start in range(first, last, TILE):
        place = start + tl.arange(0, TILE)
        known = (place >= 0) & (place < last)
        inside = at < DIM
        values = load_places(
            rows, ring, place, known, first_row, begin, slot, offset, at, inside, 2 * WIDTH, RING
        ).to(tl.float32)
        scores = load_places(
            rows, ring, place, known, first_row, begin, slot, WIDTH + offset, at, inside,
            2 * WIDTH, RING,
        ).to(tl.float32)  # fmt: skip
        scores = tl.where(known[:, None], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=0))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        shrink = tl.exp(peak - level)
        share = tl.exp(scores - level[None, :])
        total = tl.fma(total, shrink, tl.sum(share, axis=0))
        mixed = tl.fma(mixed, shrink, tl.sum(share * values, axis=0))
        peak = higher
    return peak, total, mixed


@triton.jit
def compress_kernel(
    rows, ring, tables, starts, lengths, slots, cos_sin, norm, cache, eps, table_stride,
    num_sequences,
    DIM: tl.constexpr, WIDTH: tl.constexpr, TURNED: tl.constexpr, RING: tl.constexpr,
    RATIO: tl.constexpr, BLOCK: tl.constexpr, PER_BLOCK: tl.constexpr,
    DIM_TILE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (rows): the program of an entry's last row makes it."""
    line = tl.program_id(0)
    seq, first_row, begin, position, slot = place_row(starts, lengths, slots, line, num_sequences)
    if position < 0:
        return
    if (position + 1) % RATIO != 0:
        return
    at = tl.arange(0, DIM_TILE)
    own = position + 1 - RATIO
    peak = tl.full([DIM_TILE], float("-inf"), tl.float32)
    total = tl.zeros([DIM_TILE], tl.float32)
    mixed = tl.zeros([DIM_TILE], tl.float32)
    if WIDTH > DIM:
        peak, total, mixed = _add_positions(
            peak, total, mixed, rows, ring, own - RATIO, own, first_row, begin, slot, 0, at,
            DIM, WIDTH, RING, TILE,
        )  # fmt: skip
    peak, total, mixed = _add_positions(
        peak, total, mixed, rows, ring, own, position + 1, first_row, begin, slot, WIDTH - DIM, at,
        DIM, WIDTH, RING, TILE,
    )  # fmt: skip
    inside = at < DIM
    mixed = tl.where(inside, mixed / tl.where(total == 0.0, 1.0, total), 0.0)
    gain = tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
    mixed = mixed / tl.sqrt(tl.sum(mixed * mixed, axis=0) / DIM + eps) * gain
    cos, sin = load_angles(cos_sin + own.to(tl.int64) * TURNED, DIM, TURNED, DIM_TILE // 2)
    mixed = rotate(tl.reshape(mixed, (1, DIM_TILE)), cos, sin, DIM_TILE // 2)
    block = tl.load(tables + seq.to(tl.int64) * table_stride + position // BLOCK).to(tl.int64)
    where = cache + (block * PER_BLOCK + (position // RATIO) % PER_BLOCK) * DIM
    tl.store(where + at[None, :], mixed.to(cache.dtype.element_ty), mask=inside[None, :])


@triton.jit
def keep_kernel(
    rows, ring, starts, lengths, slots, num_sequences,
    WIDTH: tl.constexpr, RING: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (rows, tiles of elements)."""
    line = tl.program_id(0)
    seq, _, _, position, slot = place_row(starts, lengths, slots, line, num_sequences)
    if position < 0:
        return
    if position < tl.load(lengths + seq) - RING:
        return
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    row = tl.load(rows + line.to(tl.int64) * WIDTH + at, mask=at < WIDTH)
    where = ring + (slot * RING + position % RING) * WIDTH + at
    tl.store(where, row.to(ring.dtype.element_ty), mask=at < WIDTH)


def compress(
    rows: Tensor,
    ring: Tensor,
    rings: Rings,
    cos_sin: Tensor,
    norm: Tensor,
    entries: Entries,
    *,
    eps: float,
) -> None:
    """See kernels.reference.v4.compress; all tensors are contiguous. `keep` must come later.

    Raises:
        ValueError: shapes, formats, strides or devices do not fit; the message names the tensor.
    """
    name, device, cache = "v4 compress", rows.device, entries.cache
    check(name, "rows", rows, (None, 2, None), FLOATS, device)
    count, _, width = rows.shape
    check(name, "ring", ring, (None, None, 2, width), (rows.dtype,), device)
    check(name, "entries.cache", cache, (None, None, None), FLOATS, device)
    dim = cache.shape[2]
    check(name, "norm", norm, (dim,), FLOATS, device)
    check(name, "cos_sin", cos_sin, (None, None, 2), (torch.float32,), device)
    check_rings(name, rings, device)
    if width not in (dim, 2 * dim) or dim % 2 or 2 * cos_sin.shape[1] > dim:
        raise ValueError(
            f"{name}: rows are {width} wide and cos_sin rotates {2 * cos_sin.shape[1]} elements, "
            f"for entries of an even size {dim} these must be {dim} or {2 * dim}, and {dim} at most"
        )
    reach = entries.ratio * width // dim - 1
    if ring.shape[1] < reach:
        raise ValueError(
            f"{name}: ring has {ring.shape[1]} places, an entry reads {reach} earlier rows"
        )
    if not count or not len(rings.slots):
        return
    batch = rings.batch
    compress_kernel[(count,)](
        rows, ring, batch.block_tables, batch.query_starts, batch.lengths, rings.slots, cos_sin,
        norm, cache, eps, batch.block_tables.stride(0), len(rings.slots),
        DIM=dim, WIDTH=width, TURNED=2 * cos_sin.shape[1], RING=ring.shape[1],
        RATIO=entries.ratio, BLOCK=entries.block_size, PER_BLOCK=cache.shape[1],
        DIM_TILE=max(16, triton.next_power_of_2(dim)), TILE=TILE, num_warps=4,
    )  # fmt: skip


def keep(rows: Tensor, ring: Tensor, rings: Rings) -> None:
    """See kernels.reference.v4.keep; all tensors are contiguous.

    Raises:
        ValueError: shapes, formats, strides or devices do not fit; the message names the tensor.
    """
    name, device = "v4 keep", rows.device
    inner = rows.shape[1:]
    check(name, "rows", rows, (None, *inner), FLOATS, device)
    check(name, "ring", ring, (None, None, *inner), FLOATS, device)
    check_rings(name, rings, device)
    if not len(rows) or not len(rings.slots):
        return
    batch, width = rings.batch, inner.numel()
    keep_kernel[(len(rows), triton.cdiv(width, KEPT))](
        rows, ring, batch.query_starts, batch.lengths, rings.slots, len(rings.slots),
        WIDTH=width, RING=ring.shape[1], TILE=min(KEPT, triton.next_power_of_2(width)),
        num_warps=4,
    )  # fmt: skip
