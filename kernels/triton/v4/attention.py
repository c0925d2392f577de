"""Attention of DeepSeek V4: a window of positions and compressed entries under one softmax.

A program computes some heads of one row, which reads keys of its own: nothing is split, so a row's
result does not depend on the batch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.checks import FLOATS, check
from kernels.triton.interpreted import INTERPRETED
from kernels.triton.ragged.softmax import add_tile, finish
from kernels.triton.ragged.tiles import Tiles
from kernels.triton.v4.places import check_rings, load_angles, load_places, place_row, rotate
from kernels.v4 import Entries, Rings

_NAME = "v4 attention"
TILES = {
    2: Tiles(rows=32, positions=32, warps=8, stages=2),
    4: Tiles(rows=32, positions=16, warps=8, stages=2),
}
"""By bytes of an element."""
_LARGEST = 512


@triton.jit
def _add_keys(peak, total, mixed, query, keys, known, scale, WIDEN: tl.constexpr):
    """Join a tile of keys [TILE, DIM], which are the values too."""
    if WIDEN:
        scores = tl.dot(query.to(tl.float32), tl.trans(keys.to(tl.float32)), input_precision="ieee")
    else:
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    scores = tl.where(known[None, :], scores * scale, float("-inf"))
    return add_tile(peak, total, mixed, scores, keys, WIDEN)


@triton.jit
def v4_attention_kernel(
    q, keys, ring, tables, starts, lengths, slots, cos_sin, sinks, cache, chosen, out, scale,
    table_stride, num_sequences,
    HEADS: tl.constexpr, DIM: tl.constexpr, TURNED: tl.constexpr, WINDOW: tl.constexpr,
    RING: tl.constexpr, RATIO: tl.constexpr, BLOCK: tl.constexpr, PER_BLOCK: tl.constexpr,
    CHOSEN: tl.constexpr, WIDEN: tl.constexpr,
    ROWS: tl.constexpr, DIM_TILE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (rows, tiles of ROWS heads). RATIO 0: no entries; CHOSEN 0: all that the row sees."""
    line = tl.program_id(0)
    seq, first_row, begin, position, slot = place_row(starts, lengths, slots, line, num_sequences)
    if position < 0:
        return
    line = line.to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, DIM_TILE)
    mine = head < HEADS
    inside = mine[:, None] & (at[None, :] < DIM)
    offsets = (line * HEADS + head)[:, None] * DIM + at[None, :]
    query = tl.load(q + offsets, mask=inside, other=0.0)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM_TILE], tl.float32)
    for start in range(0, WINDOW, TILE):
        number = start + tl.arange(0, TILE)
        place = position - WINDOW + 1 + number
        known = (place >= 0) & (number < WINDOW)
        tile = load_places(
            keys, ring, place, known, first_row, begin, slot, 0, at, at < DIM, DIM, RING
        )
        peak, total, mixed = _add_keys(
            peak, total, mixed, query, tile.to(query.dtype), known, scale, WIDEN
        )
    if RATIO > 0:
        visible = (position + 1) // RATIO
        if CHOSEN > 0:
            visible = tl.minimum(visible, CHOSEN)
        for start in range(0, visible, TILE):
            number = start + tl.arange(0, TILE)
            known = number < visible
            if CHOSEN > 0:
                number = tl.load(chosen + line * CHOSEN + number, mask=known, other=-1)
                known = number >= 0
                number = tl.where(known, number, 0)
            block = tl.load(
                tables + seq.to(tl.int64) * table_stride + ((number + 1) * RATIO - 1) // BLOCK,
                mask=known, other=0,
            ).to(tl.int64)  # fmt: skip
            where = cache + (block * PER_BLOCK + number % PER_BLOCK)[:, None] * DIM + at[None, :]
            tile = tl.load(where, mask=known[:, None] & (at[None, :] < DIM), other=0.0)
            peak, total, mixed = _add_keys(
                peak, total, mixed, query, tile.to(query.dtype), known, scale, WIDEN
            )
    mixed = finish(peak, total, mixed, sinks, tl.where(mine, head, 0), True)
    cos, sin = load_angles(cos_sin + line * TURNED, DIM, TURNED, DIM_TILE // 2)
    mixed = rotate(mixed, cos, -sin, DIM_TILE // 2)
    tl.store(out + offsets, mixed.to(out.dtype.element_ty), mask=inside)


def attention(
    q: Tensor,
    keys: Tensor,
    ring: Tensor,
    rings: Rings,
    cos_sin: Tensor,
    sinks: Tensor,
    *,
    window: int,
    entries: Entries | None = None,
) -> Tensor:
    """See kernels.reference.v4.attention; all tensors are contiguous.

    Raises:
        ValueError: shapes, formats, strides or devices do not fit; the message names the tensor.
    """
    _check(q, keys, ring, rings, cos_sin, sinks, window, entries)
    rows, heads, dim = q.shape
    out = torch.empty_like(q)
    if not rows or not len(rings.slots):
        return out
    tiles, batch = TILES[q.element_size()], rings.batch
    chosen = None if entries is None else entries.chosen
    v4_attention_kernel[(rows, triton.cdiv(heads, tiles.rows))](
        q, keys, ring, batch.block_tables, batch.query_starts, batch.lengths, rings.slots, cos_sin,
        sinks, None if entries is None else entries.cache, chosen, out, dim**-0.5,
        batch.block_tables.stride(0), len(rings.slots),
        HEADS=heads, DIM=dim, TURNED=2 * cos_sin.shape[1], WINDOW=window, RING=ring.shape[1],
        RATIO=entries.ratio if entries else 0, BLOCK=entries.block_size if entries else 1,
        PER_BLOCK=entries.cache.shape[1] if entries else 1,
        CHOSEN=0 if chosen is None else chosen.shape[1], WIDEN=INTERPRETED,
        ROWS=tiles.rows, DIM_TILE=max(16, triton.next_power_of_2(dim)), TILE=tiles.positions,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


def _check(
    q: Tensor, keys: Tensor, ring: Tensor, rings: Rings, cos_sin: Tensor, sinks: Tensor,
    window: int, entries: Entries | None,
) -> None:  # fmt: skip
    device, (rows, heads, dim) = q.device, q.shape
    check(_NAME, "q", q, (None, None, None), FLOATS, device)
    check(_NAME, "keys", keys, (rows, dim), (q.dtype,), device)
    check(_NAME, "ring", ring, (None, None, dim), (q.dtype,), device)
    check(_NAME, "cos_sin", cos_sin, (rows, None, 2), (torch.float32,), device)
    check(_NAME, "sinks", sinks, (heads,), (torch.float32,), device)
    check_rings(_NAME, rings, device)
    if not 1 <= window <= ring.shape[1] + 1:
        raise ValueError(
            f"{_NAME}: window is {window}, it must be 1 to {ring.shape[1] + 1}: the ring has "
            f"{ring.shape[1]} places, and a row's own key is not read from it"
        )
    if dim > _LARGEST or dim % 2 or 2 * cos_sin.shape[1] > dim:
        raise ValueError(
            f"{_NAME}: heads have {dim} elements, they must have an even number up to {_LARGEST}, "
            f"and at least the {2 * cos_sin.shape[1]} that cos_sin rotates"
        )
    if entries is None:
        return
    check(_NAME, "entries.cache", entries.cache, (None, None, dim), FLOATS, device)
    if entries.chosen is not None:
        check(_NAME, "entries.chosen", entries.chosen, (rows, None), (torch.int32,), device)
