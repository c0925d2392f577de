"""Kernels of attention over latent vectors (MLA): all heads share one vector per position.

Its first RANK elements are key and value, the rest is key only. A tile of 32 rows holds the heads
of one row, or of several rows of one sequence: with more, the sums would not fit the registers.
"""

import triton
import triton.language as tl

from kernels.triton.ragged.extend import find_sequence, row_sequence
from kernels.triton.ragged.softmax import add_tile, finish, join


@triton.jit
def _parts_of(where, inside, RANK: tl.constexpr, WIDTH: tl.constexpr,
              RANK_TILE: tl.constexpr, REST_TILE: tl.constexpr):  # fmt: skip
    """The value part and the rest of vectors that begin at `where` [N]."""
    at, rest = tl.arange(0, RANK_TILE), tl.arange(0, REST_TILE)
    value = tl.load(
        where[:, None] + at[None, :], mask=inside[:, None] & (at[None, :] < RANK), other=0.0
    )
    key = tl.load(
        where[:, None] + RANK + rest[None, :],
        mask=inside[:, None] & (rest[None, :] < WIDTH - RANK),
        other=0.0,
    )
    return value, key


@triton.jit
def _scores(query, turned, value, key, WIDEN: tl.constexpr):
    """[ROWS, TILE]: products of both parts."""
    if WIDEN:
        query, turned = query.to(tl.float32), turned.to(tl.float32)
        value, key = value.to(tl.float32), key.to(tl.float32)
    scores = tl.dot(query, tl.trans(value), input_precision="ieee")
    return tl.dot(turned, tl.trans(key), acc=scores, input_precision="ieee")


@triton.jit
def _attend_latents(
    query, turned, position, cache, table, first, last, scale,
    RANK: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, WIDEN: tl.constexpr,
    ROWS: tl.constexpr, RANK_TILE: tl.constexpr, REST_TILE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """See softmax.attend_split; over latents."""
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, RANK_TILE], tl.float32)
    for start in range(first, last, TILE):
        place = start + tl.arange(0, TILE)
        known = place < last
        block = tl.load(table + place // BLOCK, mask=known, other=0).to(tl.int64)
        where = cache + (block * BLOCK + place % BLOCK) * WIDTH
        value, key = _parts_of(where, known, RANK, WIDTH, RANK_TILE, REST_TILE)
        scores = _scores(query, turned, value, key, WIDEN) * scale
        seen = known[None, :] & (place[None, :] <= position[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        peak, total, mixed = add_tile(peak, total, mixed, scores, value, WIDEN)
    return peak, total, mixed


@triton.jit
def latent_decode_kernel(
    q, cache, tables, lengths, peaks, totals, parts, scale, q_stride, q_head_stride, table_stride,
    COUNT: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    WIDEN: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, RANK_TILE: tl.constexpr,
    REST_TILE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (sequences, tiles of the COUNT heads, splits); `decode_join_kernel` follows."""
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    mine = head < COUNT
    length = tl.load(lengths + seq)
    start = tl.program_id(2) * SPLIT
    if start >= length:
        return
    where = q + seq * q_stride + head.to(tl.int64) * q_head_stride
    query, turned = _parts_of(where, mine, RANK, WIDTH, RANK_TILE, REST_TILE)
    peak, total, mixed = _attend_latents(
        query, turned, tl.where(mine, length - 1, -1), cache, tables + seq * table_stride,
        start, tl.minimum(start + SPLIT, length), scale,
        RANK, WIDTH, BLOCK, WIDEN, ROWS, RANK_TILE, REST_TILE, TILE,
    )  # fmt: skip
    part = (seq * COUNT + head) * tl.num_programs(2) + tl.program_id(2)
    at = tl.arange(0, RANK_TILE)
    inside = mine[:, None] & (at[None, :] < RANK)
    tl.store(parts + part[:, None] * RANK + at[None, :], mixed, mask=inside)
    tl.store(peaks + part, peak, mask=mine)
    tl.store(totals + part, total, mask=mine)


@triton.jit
def latent_extend_kernel(
    q, cache, tables, starts, lengths, out, scale, q_stride, q_head_stride, table_stride,
    first_sequence, num_sequences,
    COUNT: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, WIDEN: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr,
    RANK_TILE: tl.constexpr, REST_TILE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, chunks of HEADS heads); see extend.extend_kernel."""
    queries: tl.constexpr = ROWS // HEADS
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    seq, tile = find_sequence(starts, tile, first_sequence, num_sequences, queries)
    first_row = tl.load(starts + seq)
    count = tl.load(starts + seq + 1) - first_row
    if tile * queries >= count:
        return
    begin = tl.load(lengths + seq) - count
    row = tl.arange(0, ROWS)
    head = tl.program_id(1) * HEADS + row % HEADS
    number = tile * queries + row // HEADS
    mine = (row < queries * HEADS) & (head < COUNT) & (number < count)
    line = (first_row + number).to(tl.int64)
    where = q + line * q_stride + head.to(tl.int64) * q_head_stride
    query, turned = _parts_of(where, mine, RANK, WIDTH, RANK_TILE, REST_TILE)
    end = begin + tl.minimum((tile + 1) * queries, count)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, RANK_TILE], tl.float32)
    for start in range(0, end, SPLIT):
        part_peak, part_total, part_mixed = _attend_latents(
            query, turned, tl.where(mine, begin + number, -1), cache,
            tables + seq.to(tl.int64) * table_stride, start, tl.minimum(start + SPLIT, end), scale,
            RANK, WIDTH, BLOCK, WIDEN, ROWS, RANK_TILE, REST_TILE, TILE,
        )  # fmt: skip
        peak, total, mixed = join(peak, total, mixed, part_peak, part_total, part_mixed)
    mixed = finish(peak, total, mixed, out, head, False)
    at = tl.arange(0, RANK_TILE)
    where = out + (line * COUNT + head)[:, None] * RANK + at[None, :]
    tl.store(where, mixed.to(out.dtype.element_ty), mask=mine[:, None] & (at[None, :] < RANK))


@triton.jit
def latent_chosen_kernel(
    q, cache, tables, starts, chosen, out, scale, q_stride, q_head_stride, table_stride,
    num_sequences,
    COUNT: tl.constexpr, CHOSEN: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, WIDEN: tl.constexpr, ROWS: tl.constexpr,
    RANK_TILE: tl.constexpr, REST_TILE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (rows, tiles of the COUNT heads): each row attends to positions of its own.

    chosen [T, CHOSEN] int32 lists them, padded with -1 at the end.
    """
    line = tl.program_id(0)
    seq = row_sequence(starts, line, num_sequences)
    if line >= tl.load(starts + num_sequences):
        return
    line = line.to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    mine = head < COUNT
    where = q + line * q_stride + head.to(tl.int64) * q_head_stride
    query, turned = _parts_of(where, mine, RANK, WIDTH, RANK_TILE, REST_TILE)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, RANK_TILE], tl.float32)
    for start in range(0, CHOSEN, TILE):
        number = start + tl.arange(0, TILE)
        place = tl.load(chosen + line * CHOSEN + number, mask=number < CHOSEN, other=-1)
        known = place >= 0
        place = tl.where(known, place, 0)
        block = tl.load(
            tables + seq.to(tl.int64) * table_stride + place // BLOCK, mask=known, other=0
        )
        where = cache + (block.to(tl.int64) * BLOCK + place % BLOCK) * WIDTH
        value, key = _parts_of(where, known, RANK, WIDTH, RANK_TILE, REST_TILE)
        scores = _scores(query, turned, value, key, WIDEN) * scale
        scores = tl.where(known[None, :], scores, float("-inf"))
        peak, total, mixed = add_tile(peak, total, mixed, scores, value, WIDEN)
    mixed = finish(peak, total, mixed, out, head, False)
    at = tl.arange(0, RANK_TILE)
    where = out + (line * COUNT + head)[:, None] * RANK + at[None, :]
    tl.store(where, mixed.to(out.dtype.element_ty), mask=mine[:, None] & (at[None, :] < RANK))
