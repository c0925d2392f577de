"""What some rows gain from some positions, and how such parts are joined.

A part is (peak, total, mixed): the highest score, the sum of exp(score - peak), and the values
weighted by it. Source: Dao et al. 2022 (FlashAttention), section 3.1. A part of no position is
(-inf, 0, 0); joining it changes no bit.
"""

import triton
import triton.language as tl


@triton.jit
def bend(scores, soft_cap):
    """soft_cap * tanh(scores / soft_cap), by an exponential that may overflow to infinity.

    tanh(x) = 1 - 2 / (exp(2 x) + 1) has an absolute error of some units of 2^-24.
    """
    return soft_cap * (1.0 - 2.0 / (tl.exp(scores * (2.0 / soft_cap)) + 1.0))


@triton.jit
def add_tile(peak, total, mixed, scores, values, WIDEN: tl.constexpr):
    """Join a tile of scores [ROWS, TILE] (-inf: not attended to) and values [TILE, DIM]."""
    higher = tl.maximum(peak, tl.max(scores, axis=1))
    level = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp(peak - level)
    share = tl.exp(scores - level[:, None])
    total = tl.fma(total, shrink, tl.sum(share, axis=1))
    # A share is rounded to the format of the values, as the tensor cores want it.
    rounded = share.to(values.dtype)
    if WIDEN:
        rounded, values = rounded.to(tl.float32), values.to(tl.float32)
    mixed = tl.dot(rounded, values, acc=mixed * shrink[:, None], input_precision="ieee")
    return higher, total, mixed


@triton.jit
def join(peak, total, mixed, part_peak, part_total, part_mixed):
    """Join a part to the parts before it: [ROWS], [ROWS], [ROWS, DIM]."""
    higher = tl.maximum(peak, part_peak)
    level = tl.where(higher == float("-inf"), 0.0, higher)
    old, new = tl.exp(peak - level), tl.exp(part_peak - level)
    total = tl.fma(total, old, part_total * new)
    mixed = tl.fma(mixed, tl.broadcast_to(old[:, None], mixed.shape), part_mixed * new[:, None])
    return higher, total, mixed


@triton.jit
def finish(peak, total, mixed, sinks, head, HAS_SINKS: tl.constexpr):
    """The softmax's quotient [ROWS, DIM]; 0 for rows that attended to nothing.

    `head` [ROWS] is the query head of each row, and sinks[head] is read.
    """
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        higher = tl.maximum(peak, sink)
        level = tl.where(higher == float("-inf"), 0.0, higher)
        old = tl.exp(peak - level)
        total = tl.fma(total, old, tl.exp(sink - level))
        mixed = mixed * old[:, None]
    return mixed / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def attend_split(
    query, position, cache, table, first, last, lowest, key_head, scale, soft_cap, key_scale,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr,
    CAPPED: tl.constexpr, WIDEN: tl.constexpr,
    ROWS: tl.constexpr, DIM_TILE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The part of rows [ROWS, DIM_TILE] over positions first to last - 1.

    `first` is a multiple of TILE. A row attends to the positions up to its own, to WINDOW of them
    if that is not 0; one at position -1 to nothing. Nothing below `lowest` is read: earlier blocks
    of a window may be another sequence's by now. `table` is the line of the sequence.
    """
    at = tl.arange(0, DIM_TILE)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM_TILE], tl.float32)
    for start in range(first, last, TILE):
        place = start + tl.arange(0, TILE)
        known = (place < last) & (place >= lowest)
        block = tl.load(table + place // BLOCK, mask=known, other=0).to(tl.int64)
        slot = block * BLOCK + place % BLOCK
        where = cache + slot[:, None] * (2 * KV_HEADS * DIM) + key_head * DIM + at[None, :]
        inside = known[:, None] & (at[None, :] < DIM)
        keys = tl.load(where, mask=inside, other=0.0).to(query.dtype)
        values = tl.load(where + KV_HEADS * DIM, mask=inside, other=0.0).to(query.dtype)
        if WIDEN:
            scores = tl.dot(
                query.to(tl.float32), tl.trans(keys.to(tl.float32)), input_precision="ieee"
            )
        else:
            scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
        scores = scores * (scale * key_scale)
        if CAPPED:
            scores = bend(scores, soft_cap)
        seen = known[None, :] & (place[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (place[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        peak, total, mixed = add_tile(peak, total, mixed, scores, values, WIDEN)
    return peak, total, mixed
