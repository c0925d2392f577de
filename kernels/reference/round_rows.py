"""Rows of a round by their definition: one sequence after another."""

import itertools

import torch
from torch import Tensor

from kernels.ragged import RaggedBatch
from kernels.round_rows import RoundRows, check_round_rows


def round_rows(
    tokens: Tensor, previous: Tensor, drawn: Tensor, batch: RaggedBatch, block_size: int
) -> RoundRows:
    """See kernels.round_rows.MakeRoundRows."""
    check_round_rows(tokens, previous, drawn, batch)
    ids, positions, slots = (torch.zeros(len(tokens), dtype=torch.int64) for _ in range(3))
    starts, lengths = batch.query_starts.tolist(), batch.lengths.tolist()
    for sequence, (first, stop) in enumerate(itertools.pairwise(starts)):
        for row in range(first, stop):
            position = lengths[sequence] - (stop - row)
            block = int(batch.block_tables[sequence, position // block_size])
            ids[row] = tokens[row]
            positions[row] = position
            slots[row] = block * block_size + position % block_size
        if stop > first and previous[sequence] >= 0:
            ids[stop - 1] = drawn[int(previous[sequence])]
    return RoundRows(*(made.to(tokens.device) for made in (ids, positions, slots)))
