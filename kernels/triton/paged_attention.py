"""Decode attention over paged keys and values (split-KV, online softmax; Dao et al. 2023).

A sequence's positions are cut into splits of SPLIT positions, regardless of the batch, so the order
of every sum depends on the sequence alone. A second kernel combines the splits.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

SPLIT = 512
"""Positions of one split."""
TILE = 32
"""Positions of one step in a split."""
_MIN_ROWS = 16  # smallest matrix product of the tensor cores


@triton.jit
def attend_split_kernel(
    q, cache, tables, lengths, out, peak, total, scale, table_stride,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, DIM_TILE: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    length = tl.load(lengths + seq)
    first = split * SPLIT
    if first >= length:
        return
    last = tl.minimum(first + SPLIT, length)
    row = tl.arange(0, ROWS)
    at = tl.arange(0, DIM_TILE)
    q_row = seq * (KV_HEADS * GROUP) + head * GROUP + row
    q_inside = (row[:, None] < GROUP) & (at[None, :] < DIM)
    query = tl.load(q + q_row[:, None] * DIM + at[None, :], mask=q_inside, other=0.0)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_TILE], tl.float32)
    for start in range(first, last, TILE):
        position = start + tl.arange(0, TILE)
        seen = position < last
        block = tl.load(tables + seq * table_stride + position // BLOCK, mask=seen, other=0)
        slot = block.to(tl.int64) * BLOCK + position % BLOCK
        where = cache + slot[:, None] * (2 * KV_HEADS * DIM) + head * DIM + at[None, :]
        inside = seen[:, None] & (at[None, :] < DIM)
        keys = tl.load(where, mask=inside, other=0.0)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        shrink = tl.exp(best - higher)
        share = tl.exp(scores - higher[:, None])
        weight = weight * shrink + tl.sum(share, axis=1)
        values = tl.load(where + KV_HEADS * DIM, mask=inside, other=0.0)
        gained = tl.dot(share.to(values.dtype), values, input_precision="ieee")
        acc = acc * shrink[:, None] + gained
        best = higher
    part = q_row * num_splits + split
    tl.store(out + part[:, None] * DIM + at[None, :], acc, mask=q_inside)
    tl.store(peak + part, best, mask=row < GROUP)
    tl.store(total + part, weight, mask=row < GROUP)


@triton.jit
def combine_splits_kernel(
    out, peak, total, lengths, combined, num_splits,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_TILE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0).to(tl.int64)
    row = seq * HEADS + tl.program_id(1)
    used = tl.cdiv(tl.load(lengths + seq), SPLIT)
    at = tl.arange(0, DIM_TILE)
    inside = at < DIM
    best = float("-inf")
    for split in range(used):
        best = tl.maximum(best, tl.load(peak + row * num_splits + split))
    weight = 0.0
    acc = tl.zeros([DIM_TILE], tl.float32)
    for split in range(used):
        part = row * num_splits + split
        shrink = tl.exp(tl.load(peak + part) - best)
        weight += shrink * tl.load(total + part)
        acc += shrink * tl.load(out + part * DIM + at, mask=inside, other=0.0)
    tl.store(combined + row * DIM + at, (acc / weight).to(combined.dtype.element_ty), mask=inside)


def paged_decode_attention(
    q: Tensor, cache: Tensor, block_tables: Tensor, lengths: Tensor, *, max_length: int
) -> Tensor:
    """Attention of one query row per sequence over its cached positions.

    Args:
        q: [sequences, heads, dim], contiguous.
        cache: [blocks, block, 2 * kv_heads, dim]: keys, then values, of each position.
        block_tables: [sequences, blocks] int64, contiguous.
        lengths: [sequences] int32 on the same device: positions to attend to, at least 1 each.
        max_length: the largest length, known on the host; it sets the number of splits.

    Returns:
        [sequences, heads * dim].

    Raises:
        ValueError: a tensor is not contiguous, or q and cache do not fit together.
    """
    sequences, heads, dim = q.shape
    block, kv_heads = cache.shape[1], cache.shape[2] // 2
    if not (q.is_contiguous() and cache.is_contiguous() and block_tables.is_contiguous()):
        raise ValueError("paged attention: q, cache and block_tables must be contiguous")
    if heads % kv_heads or cache.shape[3] != dim:
        raise ValueError(
            f"paged attention: q {tuple(q.shape)} does not fit cache {tuple(cache.shape)}: query "
            "heads must be a multiple of key heads, and head sizes equal"
        )
    combined = torch.empty(sequences, heads * dim, dtype=q.dtype, device=q.device)
    if not sequences:
        return combined
    group = heads // kv_heads
    splits = triton.cdiv(max_length, SPLIT)
    out = torch.empty(sequences, heads, splits, dim, dtype=torch.float32, device=q.device)
    peak = torch.empty(sequences, heads, splits, dtype=torch.float32, device=q.device)
    total = torch.empty_like(peak)
    dim_tile = max(_MIN_ROWS, triton.next_power_of_2(dim))
    attend_split_kernel[(sequences, kv_heads, splits)](
        q, cache, block_tables, lengths, out, peak, total, 1 / math.sqrt(dim),
        block_tables.stride(0), KV_HEADS=kv_heads, GROUP=group, DIM=dim, BLOCK=block,
        ROWS=max(_MIN_ROWS, triton.next_power_of_2(group)), DIM_TILE=dim_tile,
        SPLIT=SPLIT, TILE=TILE, num_warps=4, num_stages=3,
    )  # fmt: skip
    combine_splits_kernel[(sequences, heads)](
        out, peak, total, lengths, combined, splits, HEADS=heads, DIM=dim, DIM_TILE=dim_tile,
        SPLIT=SPLIT, num_warps=2,
    )  # fmt: skip
    return combined
