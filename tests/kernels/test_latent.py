"""Latent attention against its definition, on scattered blocks with rubbish in unused slots."""

import pytest
import torch

from kernels import dispatch
from kernels.interface import Kernels
from kernels.latent import IndexQuery, LatentKernels
from kernels.torch import latent as torch_latent
from services.engine.compute.models.input_metadata import InputMetadata, build_input
from services.engine.contract.runner import SequenceMetadata

CPU = torch.device("cpu")
HEADS, RANK, WIDTH, INDEX_HEADS, INDEX_DIM, TOP_K = 3, 8, 12, 16, 6, 9
# Decodes of several lengths, a prompt without and with history, over a border of 128 positions.
PARTS = [(0, 1), (5, 1), (0, 20), (140, 1), (124, 9)]
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
Case = tuple[Kernels, torch.dtype]


def _latent(kernels: Kernels) -> LatentKernels:
    assert kernels.latent is not None
    return kernels.latent


def _round(parts: list[tuple[int, int]], block_size: int) -> InputMetadata:
    counts = [-(-(start + length) // block_size) for start, length in parts]
    ids = [1 + int(i) for i in torch.randperm(sum(counts))]
    batch = []
    for seq_id, ((start, length), count) in enumerate(zip(parts, counts, strict=True)):
        table, ids = tuple(ids[:count]), ids[count:]
        batch.append(SequenceMetadata(seq_id, start, (0,) * length, None, table, sample=True))
    return build_input(batch, None, block_size, torch.float32, CPU)


def _index(rows: int, blocks: int, block_size: int, dtype: torch.dtype) -> IndexQuery:
    """Small whole numbers, exact in every format: many scores are equal."""
    return IndexQuery(
        torch.randint(-2, 3, (rows, INDEX_HEADS, INDEX_DIM)).to(dtype),
        torch.randint(-1, 3, (rows, INDEX_HEADS)).float(),
        torch.randint(-2, 3, (blocks, block_size, INDEX_DIM)).to(dtype),
        TOP_K,
    )


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("block_size", [1, 24])
def test_mixed_rounds(
    case: Case, reference: Kernels, block_size: int, indexed: bool, monkeypatch
) -> None:
    monkeypatch.setattr(torch_latent, "SCORES", 2000)  # so that prompts take several steps
    kernels, dtype = case
    data = _round(PARTS, block_size)
    rows, blocks = len(data.token_ids), 1 + max(int(g.block_tables.max()) for g in data.groups)
    cache = torch.randn(blocks, block_size, WIDTH, dtype=dtype)
    q = torch.randn(rows, HEADS, WIDTH, dtype=dtype)
    index = _index(rows, blocks, block_size, dtype) if indexed else None
    for group in data.groups:
        own = None if index is None else index.of_rows(group.rows)
        args = (q[group.rows], cache, group, RANK, 0.3, own)
        got, want = _latent(kernels).attention(*args), _latent(reference).attention(*args)
        assert got.dtype == dtype
        limit = LIMITS[dtype]
        torch.testing.assert_close(got.float(), want.float(), atol=limit, rtol=limit)


def test_equal_scores_choose_the_earliest_however_many_are_masked() -> None:
    scores = torch.tensor([[1.0, 3.0, 1.0, 2.0, 1.0, 1.0]])
    want = [True, True, True, True, False, False]
    assert torch_latent.chosen(scores, 4).tolist() == [want]
    padded = torch.cat((scores, torch.full((1, 300), float("-inf"))), 1)
    assert torch_latent.chosen(padded, 4)[0, :6].tolist() == want
    assert not torch_latent.chosen(padded, 4)[0, 6:].any()


def test_a_row_is_equal_to_the_bit_in_any_company() -> None:
    tiled = _latent(dispatch.load("torch-tiled"))
    block_size, end = 16, 150
    blocks = 12
    cache = torch.randn(blocks, block_size, WIDTH)
    q = torch.randn(end, HEADS, WIDTH)
    index = _index(end, blocks, block_size, torch.float32)

    def run(start: int, length: int, others: int) -> torch.Tensor:
        table = tuple(range(1, 1 + -(-(start + length) // block_size)))
        batch = [SequenceMetadata(0, start, (0,) * length, None, table, sample=True)]
        batch += [SequenceMetadata(1 + n, 0, (0,), None, (11,), sample=True) for n in range(others)]
        data = build_input(batch, None, block_size, torch.float32, CPU)
        rows = data.positions.clone()  # each sequence's queries are those of its positions
        parts = [
            tiled.attention(
                q[rows[g.rows]],
                cache,
                g,
                RANK,
                0.3,
                IndexQuery(
                    index.queries[rows[g.rows]], index.weights[rows[g.rows]], index.cache, TOP_K
                ),
            )
            for g in data.groups
        ]
        return torch.cat(parts)[-1]

    want = run(0, end, 0)
    for start, others in ((149, 0), (149, 3), (140, 0), (128, 2), (7, 1)):
        assert torch.equal(run(start, end - start, others), want), (start, others)


@pytest.mark.parametrize("rows", [1, 3, 33])
def test_products_of_heads_and_layer_norm(case: Case, reference: Kernels, rows: int) -> None:
    kernels, dtype = case
    weight = torch.randn(HEADS, 10, RANK, dtype=dtype)
    x = torch.randn(rows, HEADS, RANK, dtype=dtype)
    got = _latent(kernels).pack_heads(weight)
    assert got.nbytes == weight.nbytes
    limit = 3 * LIMITS[dtype]
    want = _latent(reference).pack_heads(weight)(x)
    torch.testing.assert_close(got(x), want, atol=limit, rtol=limit)
    flat, scale, bias = x[:, 0], torch.randn(RANK, dtype=dtype), torch.randn(RANK, dtype=dtype)
    normed = _latent(kernels).layer_norm(flat, scale, bias, 1e-3)
    expected = _latent(reference).layer_norm(flat, scale, bias, 1e-3)
    torch.testing.assert_close(normed, expected, atol=limit, rtol=limit)
