"""Attention of ragged batches in the interpreter beside its definition."""

import math
from dataclasses import replace

import pytest
import torch

from kernels.interface import AttentionGroup
from kernels.reference.attention import sink_attention
from kernels.reference.ragged import attention as oracle
from kernels.triton.ragged import attention as module
from kernels.triton.ragged.attention import attention
from tests.kernels.triton.ragged.cases import (
    bound,
    make_batch,
    make_cache,
    poison,
    use_plain_products,
    used_slots,
)

# Decodes, then prompts: without history, with one, over a border of splits, with no row at all.
MIXED = [(0, 1), (5, 1), (39, 1), (0, 20), (61, 1), (40, 0), (27, 9), (1, 33)]


@pytest.fixture(autouse=True)
def _short_splits(monkeypatch):
    torch.manual_seed(7)
    monkeypatch.setattr(module, "SPLIT", 64)
    poison(monkeypatch)


def case(parts, heads, kv_heads, dim, block, dtype, *, decodes=0, window=0):
    batch, blocks = make_batch(parts, block, decodes=decodes)
    rows = int(batch.query_starts[-1])
    wide = torch.randn(rows, heads + 2 * kv_heads, dim).to(dtype)  # q is a slice of wider rows
    cache = make_cache(
        blocks, block, (2 * kv_heads, dim), used_slots(batch, block, window=window), dtype
    )
    return wide[:, :heads], cache, batch


def compare(q, cache, batch, *, scale=None, soft_cap=0.0, **options):
    got = attention(q, cache, batch, scale=scale, soft_cap=soft_cap, **options)
    want = oracle(q, cache, batch, scale=scale, soft_cap=soft_cap, **options)
    assert got.dtype == q.dtype
    kv_heads = cache.shape[2] // 2
    factor = scale or 1 / math.sqrt(q.shape[-1])
    keys, values = cache[:, :, :kv_heads], cache[:, :, kv_heads:]
    limit = bound(q, keys, values, factor, extra=8 * soft_cap * 2.0**-24)
    error = (got.float() - want.float()).abs().max() if len(q) else 0.0
    assert error <= limit, f"{error} > {limit}"  # also false for NaN
    return got


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block", "dtype"),
    [
        (6, 2, 16, 16, torch.float32),
        (9, 3, 40, 8, torch.bfloat16),
        (7, 1, 64, 24, torch.float16),
        (3, 1, 100, 24, torch.bfloat16),
    ],
)
def test_mixed_rounds(heads, kv_heads, dim, block, dtype):
    compare(*case(MIXED, heads, kv_heads, dim, block, dtype, decodes=3), scale=None)


@pytest.mark.parametrize("window", [1, 64, 66])
def test_windows_read_nothing_before_them(window):
    parts = [(150, 1), (63, 1), (64, 1), (130, 40), (0, 3)]
    sample = case(parts, 4, 2, 16, 8, torch.float32, decodes=3, window=window)
    compare(*sample, scale=None, window=window)


def test_sinks_soft_cap_and_scale_together():
    sample = case(MIXED, 4, 2, 32, 16, torch.float32, decodes=3)
    sinks = torch.tensor([0.3, -2.0, 4.0, -math.inf])
    plain = compare(*sample, scale=0.7)
    both = compare(*sample, scale=0.7, soft_cap=1.5, sinks=sinks)
    assert not torch.allclose(plain, both)
    compare(*sample, scale=0.7, sinks=sinks, window=9)


def test_many_query_heads_of_one_key_head_take_several_programs():
    compare(*case([(3, 1), (70, 5)], 130, 1, 16, 16, torch.float32, decodes=1), scale=None)


def test_a_row_has_the_same_bits_alone_in_a_batch_decoded_and_in_a_prompt(monkeypatch):
    use_plain_products(monkeypatch)
    monkeypatch.setattr(module, "SPLIT", 128)
    window = 150  # the first rows see all positions, the last ones none of the first split
    q, cache, batch = case([(0, 280), (30, 1)], 3, 1, 16, 8, torch.float32)
    whole = attention(q, cache, batch, scale=None, window=window)
    for position in (0, 127, 128, 279):
        for first in {position, max(0, position - 30)}:
            rows = slice(first, position + 1)
            for decodes in {0, int(first == position)}:
                alone = replace(
                    batch,
                    query_starts=torch.tensor([0, position + 1 - first]).int(),
                    lengths=torch.tensor([position + 1]).int(),
                    block_tables=batch.block_tables[:1],
                    num_decodes=decodes,
                )
                got = attention(q[rows], cache, alone, scale=None, window=window)
                assert torch.equal(got, whole[rows])


def test_padding_of_a_captured_round_is_harmless():
    q, cache, batch = case([(5, 1), (9, 1)], 4, 2, 16, 8, torch.float32, decodes=2)
    alone = attention(q, cache, batch, scale=None)
    padded = replace(
        batch,
        query_starts=torch.tensor([0, 1, 2, 3, 3]).int(),
        lengths=torch.tensor([*batch.lengths.tolist(), 0, 7]).int(),
        block_tables=torch.cat((batch.block_tables, torch.zeros_like(batch.block_tables))),
        num_decodes=3,
        max_length=4000,
    )
    more = attention(torch.cat((q, q[:1], q[:1])), cache, padded, scale=None)
    assert torch.equal(more[:2], alone)
    assert not more[2].any()  # it attended to nothing


def test_fp8_keys_and_values_have_a_scale_per_head():
    q, cache, batch = case(MIXED, 4, 2, 16, 8, torch.float32, decodes=3)
    scales = torch.tensor([0.5, 2.0, 0.25, 3.0])
    stored = (cache / scales.view(1, 1, 4, 1)).to(torch.float8_e4m3fn)
    got = attention(q, stored, batch, scale=None, kv_scales=scales)
    wide = stored.float() * scales.view(1, 1, 4, 1)
    want = oracle(q, wide, batch, scale=None)
    assert (got - want).abs().max() <= bound(q, wide[:, :, :2], wide[:, :, 2:], 0.25)


def test_the_definition_is_that_of_groups():
    q, cache, batch = case([(5, 9)], 4, 2, 16, 8, torch.float32)
    group = AttentionGroup(
        slice(0, 9), (5,), batch.block_tables[:, :2].long(), None, causal=False, window=6
    )
    sinks = torch.randn(4)
    want = sink_attention(q, torch.empty(9, 4, 16), cache, group, sinks)
    got = oracle(q, cache, batch, scale=None, window=6, sinks=sinks)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


def test_an_empty_round():
    q, cache, batch = case([], 4, 2, 16, 8, torch.float32)
    assert attention(q, cache, batch, scale=None).shape == (0, 64)


def _refusals():
    q, cache, batch = case([(5, 1), (0, 4)], 4, 2, 16, 8, torch.float32)
    spread = torch.randn(5, 4, 32)[..., ::2]
    tables = batch.block_tables.long()
    yield "q", (spread, cache, batch), {}
    yield "cache", (q, cache[:, :, :, :8], batch), {}
    yield "cache", (q, cache.half(), batch), {}
    yield "cache", (q, cache[:, :, :3], batch), {}
    yield "cache", (q, cache.to(torch.float8_e4m3fn), batch), {}
    yield "block_tables", (q, cache, replace(batch, block_tables=tables)), {}
    yield "lengths", (q, cache, replace(batch, lengths=batch.lengths.to("meta"))), {}
    yield "query_starts", (q, cache, replace(batch, query_starts=batch.lengths)), {}
    yield "num_decodes", (q, cache, replace(batch, num_decodes=3)), {}
    yield "sinks", (q, cache, batch), {"sinks": torch.zeros(3)}
    yield "kv_scales", (q, cache, batch), {"kv_scales": torch.zeros(2)}
    yield "window", (q, cache, batch), {"window": -1}


def test_what_does_not_fit_is_refused_by_name():
    for name, args, options in _refusals():
        with pytest.raises(ValueError, match=f"^ragged attention: .*{name}"):
            attention(*args, scale=None, **options)
    q, cache, batch = case([(5, 1)], 1, 1, 300, 8, torch.float32)
    with pytest.raises(ValueError, match="300"):
        attention(q, cache, batch, scale=None)
