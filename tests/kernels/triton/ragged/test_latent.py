"""Latent attention of ragged batches in the interpreter beside its definition."""

from dataclasses import replace

import pytest
import torch

from kernels.latent import IndexQuery
from kernels.reference.ragged import latent_attention as oracle
from kernels.triton.ragged import latent_attention as module
from kernels.triton.ragged.latent_attention import latent_attention
from kernels.triton.selected import choose
from tests.kernels.triton.ragged.cases import (
    bound,
    make_batch,
    make_cache,
    poison,
    use_plain_products,
    used_slots,
)

MIXED = [(5, 1), (70, 1), (0, 20), (40, 0), (61, 9)]
RANK, WIDTH, INDEX_HEADS, INDEX_DIM = 24, 36, 5, 6


@pytest.fixture(autouse=True)
def _short_splits(monkeypatch):
    torch.manual_seed(9)
    monkeypatch.setattr(module, "SPLIT", 64)
    poison(monkeypatch)


def case(parts, heads, block, dtype, *, decodes=0):
    batch, blocks = make_batch(parts, block, decodes=decodes)
    rows = int(batch.query_starts[-1])
    q = torch.randn(rows, heads + 1, WIDTH).to(dtype)[:, :heads]
    cache = make_cache(blocks, block, (WIDTH,), used_slots(batch, block), dtype)
    return q, cache, batch


def index_for(cache, batch, top_k):
    """Small whole numbers, exact in every format: many scores are equal."""
    rows = int(batch.query_starts[-1])
    used = used_slots(batch, cache.shape[1])
    keys = torch.full((cache.shape[0] * cache.shape[1], INDEX_DIM), float("nan"))
    keys[used] = torch.randint(-2, 3, (len(used), INDEX_DIM)).float()
    return IndexQuery(
        torch.randint(-2, 3, (rows, INDEX_HEADS, INDEX_DIM)).to(cache.dtype),
        torch.randint(-1, 3, (rows, INDEX_HEADS)).float(),
        keys.to(cache.dtype).view(*cache.shape[:2], INDEX_DIM),
        top_k,
    )


def compare(q, cache, batch, index=None):
    got = latent_attention(q, cache, batch, rank=RANK, scale=0.2, index=index)
    want = oracle(q, cache, batch, rank=RANK, scale=0.2, index=index)
    assert got.dtype == q.dtype
    limit = bound(q, cache, cache[..., :RANK], 0.2)
    assert (got.float() - want.float()).abs().max() <= limit
    return got


@pytest.mark.parametrize(
    ("heads", "block", "dtype"),
    [
        (1, 16, torch.float32),
        (6, 8, torch.bfloat16),
        (6, 8, torch.float16),
        (40, 24, torch.float32),
    ],
)
def test_mixed_rounds(heads, block, dtype):
    compare(*case(MIXED, heads, block, dtype, decodes=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [1, 9, 500])
def test_an_indexer_chooses_each_rows_positions(top_k, dtype, monkeypatch):
    monkeypatch.setattr(choose, "SCORES", 1000)  # so that the choice takes several steps
    q, cache, batch = case(MIXED, 6, 8, dtype, decodes=2)
    compare(q, cache, batch, index_for(cache, batch, top_k))


def test_a_row_has_the_same_bits_alone_in_a_batch_decoded_and_in_a_prompt(monkeypatch):
    use_plain_products(monkeypatch)
    q, cache, batch = case([(0, 80), (30, 1)], 6, 8, torch.float32)
    index = index_for(cache, batch, 9)
    options = {"rank": RANK, "scale": 0.2}
    whole = latent_attention(q, cache, batch, **options)
    indexed = latent_attention(q, cache, batch, **options, index=index)
    for position in (0, 64, 79):
        rows = slice(position, position + 1)
        for decodes in (0, 1):
            alone = replace(
                batch,
                query_starts=torch.tensor([0, 1]).int(),
                lengths=torch.tensor([position + 1]).int(),
                block_tables=batch.block_tables[:1],
                num_decodes=decodes,
            )
            assert torch.equal(latent_attention(q[rows], cache, alone, **options), whole[rows])
            got = latent_attention(q[rows], cache, alone, **options, index=index.of_rows(rows))
            assert torch.equal(got, indexed[rows])


def test_what_does_not_fit_is_refused_by_name():
    q, cache, batch = case(MIXED, 6, 8, torch.float32)
    index = index_for(cache, batch, 9)
    refusals = {
        "rank": {"rank": WIDTH},
        "cache": {"cache": cache.half()},
        "q": {"q": q[:, :, ::2]},
        "index.queries": {"index": index.of_rows(slice(0, 2))},
        "weights": {"index": replace(index, weights=index.weights.double())},
        "top_k": {"index": replace(index, top_k=0)},
    }
    for name, changed in refusals.items():
        options = {"q": q, "cache": cache, "rank": RANK, "index": None} | changed
        with pytest.raises(ValueError, match=name):
            latent_attention(batch=batch, scale=1.0, **options)
