"""Attention of sequences with one row: a program per split, then one that joins the splits."""

import triton
import triton.language as tl

from kernels.triton.ragged.softmax import attend_split, finish, join


@triton.jit
def decode_split_kernel(
    q, cache, tables, lengths, kv_scales, peaks, totals, parts, scale, soft_cap,
    q_stride, q_head_stride, table_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, WINDOW: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr,
    WIDEN: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, DIM_TILE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (sequences, key heads x chunks of HEADS query heads, splits)."""
    seq = tl.program_id(0).to(tl.int64)
    chunks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    key_head = tl.program_id(1) // chunks
    row = tl.arange(0, ROWS)
    in_group = (tl.program_id(1) % chunks) * HEADS + row
    length = tl.load(lengths + seq)
    lowest = length * 0
    if WINDOW > 0:
        lowest = tl.maximum(length - WINDOW, 0)
    start = (lowest // SPLIT + tl.program_id(2)) * SPLIT
    if start >= length:
        return
    at = tl.arange(0, DIM_TILE)
    mine = (row < HEADS) & (in_group < GROUP)
    head = key_head * GROUP + in_group
    inside = mine[:, None] & (at[None, :] < DIM)
    where = q + seq * q_stride + head[:, None].to(tl.int64) * q_head_stride + at[None, :]
    query = tl.load(where, mask=inside, other=0.0)
    key_scale = 1.0
    if SCALED:
        key_scale = tl.load(kv_scales + key_head)
    peak, total, mixed = attend_split(
        query, tl.where(mine, length - 1, -1), cache, tables + seq * table_stride,
        tl.maximum(start, lowest // TILE * TILE), tl.minimum(start + SPLIT, length), lowest,
        key_head, scale, soft_cap, key_scale,
        KV_HEADS, DIM, BLOCK, WINDOW, CAPPED, WIDEN, ROWS, DIM_TILE, TILE,
    )  # fmt: skip
    part = (seq * (KV_HEADS * GROUP) + head) * tl.num_programs(2) + tl.program_id(2)
    tl.store(parts + part[:, None] * DIM + at[None, :], mixed, mask=inside)
    tl.store(peaks + part, peak, mask=mine)
    tl.store(totals + part, total, mask=mine)


@triton.jit
def decode_join_kernel(
    peaks, totals, parts, lengths, sinks, kv_scales, out, num_splits,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr, SCALED: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, DIM_TILE: tl.constexpr,
):  # fmt: skip
    """Grid (sequences, tiles of ROWS query heads)."""
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, DIM_TILE)
    mine = head < KV_HEADS * GROUP
    inside = mine[:, None] & (at[None, :] < DIM)
    length = tl.load(lengths + seq)
    lowest = length * 0
    if WINDOW > 0:
        lowest = tl.maximum(length - WINDOW, 0)
    used = tl.cdiv(length, SPLIT) - lowest // SPLIT
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM_TILE], tl.float32)
    for split in range(used):
        part = (seq * (KV_HEADS * GROUP) + head) * num_splits + split
        peak, total, mixed = join(
            peak, total, mixed,
            tl.load(peaks + part, mask=mine, other=float("-inf")),
            tl.load(totals + part, mask=mine, other=0.0),
            tl.load(parts + part[:, None] * DIM + at[None, :], mask=inside, other=0.0),
        )  # fmt: skip
    mixed = finish(peak, total, mixed, sinks, tl.where(mine, head, 0), HAS_SINKS)
    if SCALED:
        mixed = mixed * tl.load(kv_scales + KV_HEADS + tl.where(mine, head, 0) // GROUP)[:, None]
    where = out + (seq * (KV_HEADS * GROUP) + head)[:, None] * DIM + at[None, :]
    tl.store(where, mixed.to(out.dtype.element_ty), mask=inside)
