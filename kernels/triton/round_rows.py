"""Rows of a round in Triton: token ids, positions and slots in one launch.

A row finds its sequence by bisection over the first rows of all sequences.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.ragged import RaggedBatch
from kernels.round_rows import RoundRows, check_round_rows

TILE = 128
"""Rows of one program."""


@triton.jit
def round_rows_kernel(
    tokens, previous, drawn, starts, lengths, tables, token_ids, positions, slots,
    rows, sequences, steps, table_stride, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = row < rows
    used = inside & (row < tl.load(starts + sequences))
    # starts[low] <= row < starts[high], so `low` ends as the row's sequence; those without rows
    # begin where the next one does, and are passed.
    low = tl.zeros([TILE], tl.int32)
    high = low + sequences
    for _ in range(steps):
        between = (low + high) // 2
        begun = tl.load(starts + between, mask=used, other=0) <= row
        low = tl.where(begun, between, low)
        high = tl.where(begun, high, between)
    stop = tl.load(starts + low + 1, mask=used, other=0)
    position = tl.load(lengths + low, mask=used, other=0) - stop + row
    source = tl.load(previous + low, mask=used, other=-1)
    taken = used & (row + 1 == stop) & (source >= 0)
    given = tl.load(tokens + row, mask=used, other=0).to(tl.int64)
    token = tl.where(taken, tl.load(drawn + source, mask=taken, other=0), given)
    line = tables + low.to(tl.int64) * table_stride
    block = tl.load(line + position // BLOCK, mask=used, other=0).to(tl.int64)
    slot = block * BLOCK + position % BLOCK
    tl.store(token_ids + row, token, mask=inside)
    tl.store(positions + row, tl.where(used, position, 0).to(tl.int64), mask=inside)
    tl.store(slots + row, tl.where(used, slot, 0), mask=inside)


def round_rows(
    tokens: Tensor, previous: Tensor, drawn: Tensor, batch: RaggedBatch, block_size: int
) -> RoundRows:
    """See kernels.round_rows.MakeRoundRows."""
    check_round_rows(tokens, previous, drawn, batch)
    rows, sequences = len(tokens), len(batch.lengths)
    made = torch.empty(3, rows, dtype=torch.int64, device=tokens.device).unbind()
    if rows:
        round_rows_kernel[(triton.cdiv(rows, TILE),)](
            tokens, previous, drawn, batch.query_starts, batch.lengths, batch.block_tables, *made,
            rows, sequences, sequences.bit_length(), batch.block_tables.shape[1],
            BLOCK=block_size, TILE=TILE, num_warps=4,
        )  # fmt: skip
    return RoundRows(*made)
