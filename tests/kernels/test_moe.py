"""Routing and combination of experts against their formulas, and each row by itself."""

import pytest
import torch

from kernels.interface import Kernels

Case = tuple[Kernels, torch.dtype]


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("rows", "experts", "top_k"), [(0, 8, 2), (1, 4, 1), (33, 128, 8)])
def test_route(
    case: Case, reference: Kernels, rows: int, experts: int, top_k: int, renormalise: bool
) -> None:
    kernels, dtype = case
    scores = (torch.randn(rows, experts) * 3).to(dtype)
    weights, ids = kernels.route(scores, top_k, renormalise)
    want, chosen = reference.route(scores, top_k, renormalise)
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int64
    if dtype == torch.float32:
        assert ids.tolist() == chosen.tolist()
    limit = 1e-6 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(weights, want, atol=limit, rtol=limit)
    if renormalise:
        torch.testing.assert_close(weights.sum(-1), torch.ones(rows), atol=2e-2, rtol=0)


def test_combine(case: Case, reference: Kernels) -> None:
    kernels, dtype = case
    outputs = torch.randn(19, 4, 48, dtype=dtype)
    weights = torch.rand(19, 4)
    got = kernels.combine(outputs, weights)
    want = reference.combine(outputs.float(), weights)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), want, atol=1e-2, rtol=1e-2)
    if dtype == torch.float32:
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


def test_combine_adds_in_float32_and_in_the_order_of_columns(case: Case) -> None:
    """2**24 + 1 is 2**24 in float32: only the given order keeps both ones."""
    kernels, dtype = case
    outputs = torch.ones(1, 3, 4, dtype=dtype)
    weights = torch.tensor([[1.0, 1.0, 2.0**24]])
    turned = weights.flip(1)
    assert kernels.combine(outputs.float(), weights)[0, 0].item() == 2**24 + 2
    assert kernels.combine(outputs.float(), turned)[0, 0].item() == 2**24


def test_rows_do_not_depend_on_one_another(kernels: Kernels) -> None:
    scores = torch.randn(50, 24)
    outputs = torch.randn(50, 3, 47)
    weights, ids = kernels.route(scores, 3, True)
    together = kernels.combine(outputs, weights)
    for row in range(50):
        one = slice(row, row + 1)
        alone, chosen = kernels.route(scores[one], 3, True)
        assert torch.equal(alone, weights[one])
        assert torch.equal(chosen, ids[one])
        assert torch.equal(kernels.combine(outputs[one], alone), together[one])
