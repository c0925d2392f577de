"""Kernels of DeepSeek V4 in the interpreter beside their definitions."""

import math
from dataclasses import replace

import pytest
import torch

from kernels.reference import v4 as oracle
from kernels.triton.selected.choose import choose
from kernels.triton.v4 import attention as attention_module
from kernels.triton.v4 import compressor, streams
from kernels.v4 import Entries, Rings
from tests.kernels.triton.ragged.cases import UNIT, bound, make_batch, poison, use_plain_products

# (positions before the round, rows): decodes, prompts, no row, more rows than a ring has places.
MIXED = [(0, 1), (33, 1), (0, 5), (20, 0), (14, 20)]
HEADS, DIM, WINDOW, RATIO = 3, 12, 9, 4


@pytest.fixture(autouse=True)
def _seeded(monkeypatch):
    torch.manual_seed(4)
    poison(monkeypatch)


def rings_for(parts, block):
    batch, blocks = make_batch(parts, block)
    slots = (torch.randperm(len(parts)) + 1).int()
    return Rings(batch, slots), blocks


def ring_of(rings, length, inner, dtype):
    """NaN at the places of positions that no earlier round wrote."""
    ring = torch.full((len(rings.slots) + 2, length, *inner), math.nan)
    counts = rings.batch.query_starts.diff().tolist()
    lengths = rings.batch.lengths.tolist()
    for slot, total, count in zip(rings.slots.tolist(), lengths, counts, strict=True):
        for place in range(max(0, total - count - length), total - count):
            ring[slot, place % length] = torch.randn(inner)
    return ring.to(dtype)


def angles(count, size):
    turned = torch.randn(count, size // 2)
    return torch.stack((turned.cos(), turned.sin()), -1)


def entries_for(rings, blocks, block, ratio, dtype, top_k=0):
    per_block = max(1, block // ratio)
    cache = torch.full((blocks, per_block, DIM), math.nan)
    batch = rings.batch
    for line, length in zip(batch.block_tables.tolist(), batch.lengths.tolist(), strict=True):
        for number in range(length // ratio):
            at = line[((number + 1) * ratio - 1) // block]
            cache[at, number % per_block] = torch.randn(DIM)
    chosen = None
    if top_k:
        rows = int(batch.query_starts[-1])
        chosen = torch.full((rows, top_k), -1, dtype=torch.int32)
        for row, _, _, _, end in oracle._places(rings, block):
            seen = torch.randperm(end // ratio)[:top_k].sort().values
            chosen[row, : len(seen)] = seen.int()
    return Entries(cache.to(dtype), ratio, block, chosen)


@pytest.mark.parametrize(
    ("ratio", "block", "top_k", "dtype"),
    [
        (0, 8, 0, torch.bfloat16),
        (4, 8, 0, torch.float32),
        (4, 16, 3, torch.bfloat16),
        (16, 8, 0, torch.float32),
        (4, 4, 40, torch.float32),
    ],
)
def test_attention_of_window_and_entries(ratio, block, top_k, dtype):
    rings, blocks = rings_for(MIXED, block)
    rows = int(rings.batch.query_starts[-1])
    q, keys = torch.randn(rows, HEADS, DIM).to(dtype), torch.randn(rows, DIM).to(dtype)
    ring = ring_of(rings, WINDOW + 2, (DIM,), dtype)
    entries = entries_for(rings, blocks, block, ratio, dtype, top_k) if ratio else None
    args = (q, keys, ring, rings, angles(rows, 4), torch.randn(HEADS))
    got = attention_module.attention(*args, window=WINDOW, entries=entries)
    want = oracle.attention(*args, window=WINDOW, entries=entries)
    seen = [keys.flatten(), ring.flatten()] + ([entries.cache.flatten()] if entries else [])
    every = torch.cat(seen)
    every = every[~every.isnan()].view(-1, DIM)
    # Rotating adds at most two roundings, and the norm of a pair bounds its elements.
    limit = 1.5 * bound(q, every, every, DIM**-0.5)
    assert (got.float() - want.float()).abs().max() <= limit


@pytest.mark.parametrize(
    ("ratio", "overlaps", "block"), [(4, True, 8), (4, False, 16), (16, False, 8), (4, True, 4)]
)
def test_entries_are_made_of_rings_and_rows(ratio, overlaps, block):
    rings, blocks = rings_for(MIXED, block)
    rows = int(rings.batch.query_starts[-1])
    width = 2 * DIM if overlaps else DIM
    made = torch.randn(rows, 2, width)
    ring = ring_of(rings, ratio * (2 if overlaps else 1), (2, width), torch.float32)
    cache = torch.full((blocks, max(1, block // ratio), DIM), 7.0)
    got, want = Entries(cache, ratio, block), Entries(cache.clone(), ratio, block)
    table, norm = angles(64, 4), torch.randn(DIM)
    compressor.compress(made, ring, rings, table, norm, got, eps=1e-6)
    oracle.compress(made, ring, rings, table, norm, want, eps=1e-6)
    assert (want.cache != 7).any()
    # A sum of at most 32 terms of at most 1 each, an exp of each score, a norm: some 64 units.
    limit = 64 * 2.0**-24 * float(want.cache.abs().max()) * (1 + float(made.abs().max()))
    assert (got.cache - want.cache).abs().max() <= limit
    expected = ring.clone()
    compressor.keep(made, ring, rings)
    oracle.keep(made, expected, rings)
    assert torch.equal(ring.nan_to_num(9), expected.nan_to_num(9))


@pytest.mark.parametrize(("ratio", "block"), [(4, 8), (16, 8)])
def test_an_indexer_chooses_among_compressed_entries(ratio, block):
    rings, blocks = rings_for(MIXED, block)
    rows = int(rings.batch.query_starts[-1])
    queries = torch.randint(-2, 3, (rows, 5, DIM)).float()  # whole numbers: many scores are equal
    weights = torch.randint(-1, 3, (rows, 5)).float()
    entries = entries_for(rings, blocks, block, ratio, torch.float32)
    cache = entries.cache.round()
    got = choose(queries, weights, cache, rings.batch, top_k=3, ratio=ratio, block_size=block)
    for row, _, _, table, end in oracle._places(rings, block):
        scores = []
        for number in range(end // ratio):
            key = oracle._entry(replace(entries, cache=cache), table, number)
            scores.append(float(weights[row] @ (queries[row] @ key).relu()))
        best = sorted(range(len(scores)), key=lambda number: (-scores[number], number))[:3]
        want = sorted(best) + [-1] * (got.shape[1] - len(best))
        assert got[row].tolist() == want


def test_a_rows_attention_has_the_same_bits_in_one_round_and_in_many(monkeypatch):
    use_plain_products(monkeypatch)
    whole, _ = rings_for([(0, 30)], 8)
    q, keys, turned = torch.randn(30, HEADS, DIM), torch.randn(30, DIM), angles(30, 4)
    sinks = torch.randn(HEADS)
    ring = ring_of(whole, WINDOW, (DIM,), torch.float32)
    once = attention_module.attention(q, keys, ring, whole, turned, sinks, window=WINDOW)
    for first, stop in [(0, 1), (1, 13), (13, 14), (14, 30)]:
        rows = slice(first, stop)
        batch = replace(
            whole.batch,
            query_starts=torch.tensor([0, stop - first]).int(),
            lengths=torch.tensor([stop]).int(),
        )
        part = Rings(batch, whole.slots)
        own = (q[rows], keys[rows], ring, part, turned[rows], sinks)
        assert torch.equal(attention_module.attention(*own, window=WINDOW), once[rows])
        compressor.keep(keys[rows].contiguous(), ring, part)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "count", "size"), [(1, 4, 40), (19, 4, 33), (3, 2, 16), (0, 4, 8)]
)
def test_streams_are_read_and_spread(rows, count, size, dtype, monkeypatch):
    monkeypatch.setattr(streams, "SPLIT", 64)
    use_plain_products(monkeypatch)
    outputs = count * (2 + count)
    state = torch.randn(rows, count, size).to(dtype)
    weight = torch.randn(outputs, count * size) * (count * size) ** -0.5
    args = (state, weight, torch.randn(outputs), torch.rand(outputs) + 0.5)
    options = {"norm_eps": 1e-6, "eps": 1e-6, "steps": 20}
    got, want = streams.connect(*args, **options), oracle.connect(*args, **options)
    # float32 throughout: a score is off by some units per term, and balancing adds some per step.
    exact = (count * size + 20 * 8) * 2.0**-24 * 4
    for mine, theirs in zip(got[1:], want[1:], strict=True):
        torch.testing.assert_close(mine, theirs, atol=exact, rtol=exact)
    rounding = exact * 16 + (UNIT[dtype] if dtype == torch.bfloat16 else 0)
    torch.testing.assert_close(got[0], want[0], atol=rounding, rtol=rounding)
    output = torch.randn(rows, size).to(dtype)
    new, expected = (kernel(state, output, *want[1:]) for kernel in (streams.spread, oracle.spread))
    torch.testing.assert_close(new, expected, atol=rounding, rtol=rounding)
    if rows > 1:
        assert torch.equal(streams.connect(state[1:2], *args[1:], **options)[2], got[2][1:2])


def test_what_does_not_fit_is_refused_by_name():
    rings, blocks = rings_for(MIXED, 8)
    rows = int(rings.batch.query_starts[-1])
    ring, cache = torch.zeros(9, WINDOW, DIM), torch.zeros(blocks, 2, DIM)
    good = {
        "q": torch.zeros(rows, HEADS, DIM), "keys": torch.zeros(rows, DIM), "ring": ring,
        "rings": rings, "cos_sin": torch.zeros(rows, 2, 2), "sinks": torch.zeros(HEADS),
        "window": WINDOW,
    }  # fmt: skip
    bad = {
        "keys": {"keys": torch.zeros(rows - 1, DIM)},
        "ring": {"ring": ring[:, ::2]},
        "slots": {"rings": Rings(rings.batch, rings.slots.long())},
        "sinks": {"sinks": torch.zeros(HEADS).half()},
        "cos_sin": {"cos_sin": torch.zeros(rows, 9, 2)},
        "window": {"window": WINDOW + 2},
        "entries.cache": {"entries": Entries(cache[..., :8], 4, 8)},
        "entries.chosen": {"entries": Entries(cache, 4, 8, torch.zeros(rows, 3))},
    }
    for name, changed in bad.items():
        with pytest.raises(ValueError, match=f"v4 attention: .*{name}"):
            attention_module.attention(**(good | changed))
    with pytest.raises(ValueError, match="ring has 2 places, an entry reads 7"):
        compressor.compress(
            torch.zeros(rows, 2, 2 * DIM), torch.zeros(9, 2, 2, 2 * DIM), rings,
            torch.zeros(64, 2, 2), torch.ones(DIM), Entries(cache, 4, 8), eps=0.0,
        )  # fmt: skip
    with pytest.raises(ValueError, match="power of two"):
        streams.connect(
            torch.zeros(1, 3, 8), torch.zeros(15, 24), torch.zeros(15), torch.zeros(15),
            norm_eps=0.0, eps=0.0, steps=1,
        )  # fmt: skip
    with pytest.raises(ValueError, match="mix"):
        streams.spread(
            torch.zeros(1, 4, 8), torch.zeros(1, 8), torch.zeros(1, 4), torch.zeros(1, 4, 3)
        )
