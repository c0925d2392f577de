"""Attention over paged blocks; the same code serves prefills, chunks and decodes.

A block holds, per key head, keys as [D, positions] and values as [positions, D], so that scores and
weighted sums are both products of small tiles. A row processes its blocks one by one in order: its
result does not depend on the other rows of the tile, on chunks, or on what was cached.

Keys and values are stored in float32 or bfloat16 and computed in float32. A row reads its own key
and value from the cache too, so it does not matter which of them an earlier round stored.
"""

import math

from numpy import float32, int32

from kernels.compiled import job as j
from kernels.compiled.primitives import compiled, floats, halves, ints, words
from kernels.compiled.products import small_product
from kernels.compiled.rows import accumulate, rms_norm, rotate
from kernels.compiled.tiles import ADD, HALF_BITS, LANES, ROWS, STORE

_MINUS_INFINITY = float32(-math.inf)
_NAN_HALF = 0x7FC0


@compiled
def store_row(job: int, layer: int, row: int) -> None:
    """Norm and rotate one row's heads in WIDE, and store its keys and values in their block."""
    table, own = ints(job), ints(layer)
    heads, kv_heads, dim, block = table[j.HEADS], table[j.KV_HEADS], table[j.DIM], table[j.BLOCK]
    constants = floats(table[j.CONSTANTS])
    at = table[j.WIDE] + 4 * table[j.WIDE_STRIDE] * row
    cos_sin = table[j.COS_SIN] + 4 * dim * row
    for head in range(heads + kv_heads):
        here = at + 4 * dim * head
        norm = own[j.Q_NORM] if head < heads else own[j.K_NORM]
        if norm:
            rms_norm(here, norm, dim, constants[0], here)
        rotate(here, cos_sin, dim // 2, constants[1] if head < heads else float32(1.0))
    slot, size = ints(table[j.SLOTS])[row], table[j.CACHE_BYTES]
    base = own[j.CACHE] + size * (slot // block) * 2 * kv_heads * dim * block
    offset = slot % block
    for head in range(kv_heads):
        key = at + 4 * dim * (heads + head)
        value = at + 4 * dim * (heads + kv_heads + head)
        keys = base + size * (dim * block * head + offset)
        values = base + size * dim * (block * (kv_heads + head) + offset)
        if size == 2:
            store_halves(key, dim, keys, block)
            store_halves(value, dim, values, 1)
        else:
            store_floats(key, dim, keys, block)
            store_floats(value, dim, values, 1)


@compiled
def store_floats(x: int, count: int, out: int, stride: int) -> None:
    """Copy float32 values; those of `out` are `stride` elements apart."""
    values, stored = floats(x), floats(out)
    for i in range(count):
        stored[i * stride] = values[i]


@compiled
def store_halves(x: int, count: int, out: int, stride: int) -> None:
    """Round float32 values to bfloat16, ties to even; those of `out` are `stride` elements apart.

    A carry into the exponent is right: it gives the next power of two, or infinity. NaN would carry
    too, so it becomes the one NaN 0x7FC0.
    """
    values, bits, stored = floats(x), words(x), halves(out)
    for i in range(count):
        own = bits[i] & 0xFFFFFFFF
        rounded = (own + 0x7FFF + ((own >> HALF_BITS) & 1)) >> HALF_BITS
        stored[i * stride] = rounded if values[i] == values[i] else _NAN_HALF


@compiled
def widen(x: int, count: int, out: int) -> int:
    """Copy bfloat16 values as float32, which is exact; returns `out`.

    For many rows, which would each widen them as they read them, and for sizes that are not whole
    vectors.
    """
    values, wide = halves(x), words(out)
    for i in range(count):
        wide[i] = int32(values[i]) << int32(HALF_BITS)
    return out


@compiled
def attend(job: int, layer: int, tile: int, kv_head: int, scratch: int) -> None:
    """Attention of a tile of one sequence's rows, for the query heads of one key head."""
    table, own = ints(job), ints(layer)
    dim, block, kv_heads = table[j.DIM], table[j.BLOCK], table[j.KV_HEADS]
    group, size = table[j.HEADS] // kv_heads, table[j.CACHE_BYTES]
    chosen = ints(table[j.TILES] + j.TILE_BYTES * tile)
    seq = ints(table[j.SEQS] + j.SEQ_BYTES * chosen[0])
    first = seq[0] + chosen[1]
    count = min(table[j.TILE_ROWS], seq[1] - chosen[1])
    position = seq[2] + chosen[1]
    rows = count * group
    queries = scratch
    scores = queries + 4 * dim * table[j.TILE_ROWS] * group
    sums = scores + 4 * block * table[j.TILE_ROWS] * group
    state = sums + 4 * dim * table[j.TILE_ROWS] * group
    wide = state + 8 * table[j.TILE_ROWS] * group
    widens = size == 2 and (rows > 2 * ROWS or dim % LANES != 0 or block % LANES != 0)
    stored = 4 if widens else size
    init_tile(job, first, count, kv_head, queries, sums, state)
    window = own[j.WINDOW]
    start = max(0, position - window + 1) // block if window else 0
    blocks = ints(table[j.TABLES] + j.INT64_BYTES * table[j.TABLES_STRIDE] * chosen[0])
    for index in range(start, (position + count - 1) // block + 1):
        base = own[j.CACHE] + size * blocks[index] * 2 * kv_heads * dim * block
        keys = base + size * dim * block * kv_head
        values = base + size * dim * block * (kv_heads + kv_head)
        if widens:
            keys = widen(keys, dim * block, wide)
        line = stored * block
        small_product(
            queries, 4 * dim, rows, keys, line, stored, dim, scores, 4 * block, block, STORE
        )
        if window or (index + 1) * block - 1 > position:
            mask_scores(scores, rows, group, block, index * block, position, window)
        for row in range(rows):
            accumulate(scores + 4 * block * row, block, state + 8 * row, sums + 4 * dim * row, dim)
        if widens:
            values = widen(values, dim * block, wide)
        line = stored * dim
        small_product(scores, 4 * block, rows, values, line, stored, block, sums, 4 * dim, dim, ADD)
    normalise_tile(job, first, count, kv_head, sums, state)


@compiled
def init_tile(
    job: int, first: int, count: int, kv_head: int, queries: int, sums: int, state: int
) -> None:
    """Start the online softmax: copy the queries, clear sums and state.

    Args:
        first: the tile's first row among the T rows; `count` is its number of rows.
        queries: [count * heads of a group, D] float32, written from WIDE.
        sums: [count * heads of a group, D] float32, set to 0.
        state: [count * heads of a group, 2] float32, set to (-inf, 0); see `accumulate`.
    """
    table = ints(job)
    dim = table[j.DIM]
    group = table[j.HEADS] // table[j.KV_HEADS]
    copied, weighted, rows = floats(queries), floats(sums), floats(state)
    for row in range(count):
        at = table[j.WIDE] + 4 * (table[j.WIDE_STRIDE] * (first + row) + dim * group * kv_head)
        given = floats(at)
        for i in range(dim * group):
            copied[dim * group * row + i] = given[i]
            weighted[dim * group * row + i] = float32(0.0)
    for row in range(count * group):
        rows[2 * row], rows[2 * row + 1] = _MINUS_INFINITY, float32(0.0)


@compiled
def mask_scores(
    scores: int, rows: int, group: int, block: int, start: int, position: int, window: int
) -> None:
    """Set scores of positions that a row does not attend to, to -inf.

    Args:
        scores: [rows, block] float32, of the positions from `start` on.
        group: query heads per key head; that many adjacent rows share a position.
        position: position of the first row.
        window: sliding window in positions; 0 for full attention.
    """
    for row in range(rows):
        values = floats(scores + 4 * block * row)
        own = position + row // group
        for i in range(block):
            if start + i > own or (window and start + i <= own - window):
                values[i] = _MINUS_INFINITY


@compiled
def normalise_tile(job: int, first: int, count: int, kv_head: int, sums: int, state: int) -> None:
    """End the online softmax: WORK = sums / sum of exponentials."""
    table = ints(job)
    dim = table[j.DIM]
    group = table[j.HEADS] // table[j.KV_HEADS]
    for row in range(count):
        at = table[j.WORK] + 4 * (table[j.WORK_STRIDE] * (first + row) + dim * group * kv_head)
        out = floats(at)
        for head in range(group):
            own = row * group + head
            total = floats(state)[2 * own + 1]
            values = floats(sums + 4 * dim * own)
            for i in range(dim):
                out[dim * head + i] = values[i] / total
