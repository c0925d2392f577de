"""Attention of sequences with any number of rows, whose earlier positions may be in the cache."""

import triton
import triton.language as tl

from kernels.triton.ragged.softmax import attend_split, finish, join


@triton.jit
def find_sequence(starts, tile, first, num_sequences, QUERIES: tl.constexpr):
    """The sequence that a tile of QUERIES rows belongs to, and the tile's number within it.

    A sequence with n rows has floor(n / QUERIES) + 1 tiles or one more, so that the first tile of a
    sequence follows from its first row; surplus tiles are empty. Sequences before `first` have one
    row and no tile.
    """
    low = first
    high = num_sequences - 1
    while low < high:
        between = (low + high + 1) // 2
        before = (tl.load(starts + between) - first) // QUERIES + (between - first)
        if before <= tile:
            low = between
        else:
            high = between - 1
    before = (tl.load(starts + low) - first) // QUERIES + (low - first)
    return low, tile - before


@triton.jit
def row_sequence(starts, row, num_sequences):
    """The sequence that a row belongs to: the last one that begins at it or before."""
    low = 0
    high = num_sequences - 1
    while low < high:
        between = (low + high + 1) // 2
        if tl.load(starts + between) <= row:
            low = between
        else:
            high = between - 1
    return low


@triton.jit
def extend_kernel(
    q, cache, tables, starts, lengths, sinks, kv_scales, out, scale, soft_cap,
    q_stride, q_head_stride, table_stride, first_sequence, num_sequences,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, HAS_SINKS: tl.constexpr,
    SCALED: tl.constexpr, WIDEN: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, DIM_TILE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, key heads x chunks of HEADS query heads).

    A tile holds QUERIES rows of one sequence, each with HEADS query heads.
    """
    chunks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    queries: tl.constexpr = ROWS // HEADS
    # The last tiles of a sequence see the most positions: they are begun first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    seq, tile = find_sequence(starts, tile, first_sequence, num_sequences, queries)
    first_row = tl.load(starts + seq)
    count = tl.load(starts + seq + 1) - first_row
    if tile * queries >= count:
        return
    begin = tl.load(lengths + seq) - count  # positions before this round
    key_head = tl.program_id(1) // chunks
    row = tl.arange(0, ROWS)
    in_group = (tl.program_id(1) % chunks) * HEADS + row % HEADS
    number = tile * queries + row // HEADS
    mine = (row < queries * HEADS) & (in_group < GROUP) & (number < count)
    head = key_head * GROUP + in_group
    at = tl.arange(0, DIM_TILE)
    inside = mine[:, None] & (at[None, :] < DIM)
    line = (first_row + number).to(tl.int64)
    where = q + line[:, None] * q_stride + head[:, None].to(tl.int64) * q_head_stride
    query = tl.load(where + at[None, :], mask=inside, other=0.0)
    position = tl.where(mine, begin + number, -1)
    end = begin + tl.minimum((tile + 1) * queries, count)
    lowest = begin * 0
    if WINDOW > 0:
        lowest = tl.maximum(begin + tile * queries - WINDOW + 1, 0)
    key_scale = 1.0
    if SCALED:
        key_scale = tl.load(kv_scales + key_head)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM_TILE], tl.float32)
    for start in range(lowest // SPLIT * SPLIT, end, SPLIT):
        part_peak, part_total, part_mixed = attend_split(
            query, position, cache, tables + seq.to(tl.int64) * table_stride,
            tl.maximum(start, lowest // TILE * TILE), tl.minimum(start + SPLIT, end), lowest,
            key_head, scale, soft_cap, key_scale,
            KV_HEADS, DIM, BLOCK, WINDOW, CAPPED, WIDEN, ROWS, DIM_TILE, TILE,
        )  # fmt: skip
        peak, total, mixed = join(peak, total, mixed, part_peak, part_total, part_mixed)
    mixed = finish(peak, total, mixed, sinks, tl.where(mine, head, 0), HAS_SINKS)
    if SCALED:
        mixed = mixed * tl.load(kv_scales + KV_HEADS + key_head)
    where = out + (line * (KV_HEADS * GROUP) + head)[:, None] * DIM + at[None, :]
    tl.store(where, mixed.to(out.dtype.element_ty), mask=inside)
