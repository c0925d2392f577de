"""Rows of a round made by the kernel, beside their definition."""

import pytest
import torch

from kernels.ragged import RaggedBatch
from kernels.reference.round_rows import round_rows as oracle
from kernels.triton import round_rows as module
from kernels.triton.round_rows import round_rows

BLOCK = 8


def case(counts: list[int], starts: list[int], padding: int = 0, width: int = 12):
    """Sequences with so many rows after so many positions, and rows beyond the last one."""
    torch.manual_seed(len(counts))
    ends = torch.tensor([0, *counts]).cumsum(0).int()
    rows = int(ends[-1]) + padding
    batch = RaggedBatch(
        query_starts=ends,
        lengths=(torch.tensor(counts) + torch.tensor(starts)).int(),
        block_tables=torch.randint(1, 1000, (len(counts), width)).int(),
        max_queries=max(counts),
        max_length=96,
    )
    tokens = torch.randint(1, 5000, (rows,)).int()
    previous = torch.randint(-1, 7, (len(counts),)).int()
    return tokens, previous, torch.randint(5000, 9000, (7,)), batch


@pytest.mark.parametrize(
    ("counts", "starts", "padding"),
    [
        ([1], [0], 0),
        ([1, 1, 1], [0, 15, 95], 0),
        ([1, 1, 40, 3], [4, 0, 0, 16], 0),
        ([0, 1, 0, 0, 9, 0], [5, 7, 0, 3, 8, 0], 4),
        ([17] * 9, list(range(9)), 0),
    ],
)
def test_equal_to_the_definition(counts, starts, padding, monkeypatch):
    monkeypatch.setattr(module, "TILE", 16)
    made, expected = (f(*case(counts, starts, padding), BLOCK) for f in (round_rows, oracle))
    for name, own, other in zip(made._fields, made, expected, strict=True):
        assert torch.equal(own, other), name
    assert made.token_ids.dtype == torch.int64
    assert made.token_ids.max() >= 5000 or case(counts, starts)[1].max() < 0


def test_slots_beyond_32_bits():
    tokens, previous, drawn, batch = case([1], [0])
    batch.block_tables[:] = 2**30
    assert round_rows(tokens, previous, drawn, batch, BLOCK).slots.tolist() == [2**33]


@pytest.mark.parametrize("name", ["tokens", "previous", "drawn", "lengths"])
def test_a_wrong_format_is_named(name):
    tokens, previous, drawn, batch = case([2], [0])
    given = {"tokens": tokens, "previous": previous, "drawn": drawn}
    if name == "lengths":
        batch = RaggedBatch(batch.query_starts, batch.lengths.long(), batch.block_tables, 2, 96)
    else:
        given[name] = given[name].float()
    with pytest.raises(ValueError, match=f"round_rows: {name} must be"):
        round_rows(*given.values(), batch, BLOCK)
