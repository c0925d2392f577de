"""Routing and combination of experts against their formulas, and each row by itself."""

import pytest
import torch

from kernels.interface import Kernels, Routing, Scoring

Case = tuple[Kernels, torch.dtype]


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("rows", "experts", "top_k"), [(0, 8, 2), (1, 4, 1), (33, 128, 8)])
def test_route(
    case: Case, reference: Kernels, rows: int, experts: int, top_k: int, renormalise: bool
) -> None:
    kernels, dtype = case
    scores = (torch.randn(rows, experts) * 3).to(dtype)
    routing = Routing(top_k, renormalise=renormalise)
    weights, ids = kernels.route(scores, routing, None, None)
    want, chosen = reference.route(scores, routing, None, None)
    assert weights.dtype == torch.float32
    assert ids.dtype == torch.int64
    if dtype == torch.float32:
        assert ids.tolist() == chosen.tolist()
    limit = 1e-6 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(weights, want, atol=limit, rtol=limit)
    if renormalise:
        torch.testing.assert_close(weights.sum(-1), torch.ones(rows), atol=2e-2, rtol=0)


@pytest.mark.parametrize("scoring", ["sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (4, 2)])
@pytest.mark.parametrize("rows", [0, 1, 33])
def test_route_with_bias_and_groups(
    case: Case, reference: Kernels, scoring: Scoring, groups: int, top_groups: int, rows: int
) -> None:
    kernels, dtype = case
    scores = (torch.randn(rows, 24) * 3).to(dtype)
    bias = torch.randn(24)
    routing = Routing(5, scoring, scale=2.5, groups=groups, top_groups=top_groups)
    weights, ids = kernels.route(scores, routing, bias, None)
    want, chosen = reference.route(scores, routing, bias, None)
    assert ids.tolist() == chosen.tolist()
    torch.testing.assert_close(weights, want, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(weights.sum(-1), torch.full((rows,), 2.5))


def test_route_weighs_the_experts_that_it_is_given(case: Case, reference: Kernels) -> None:
    kernels, dtype = case
    scores = torch.randn(9, 16).to(dtype)
    given = torch.stack([torch.randperm(16)[:3] for _ in range(9)])
    for renormalise in (True, False):
        routing = Routing(3, "sqrt_softplus", renormalise=renormalise, scale=1.5)
        weights, ids = kernels.route(scores, routing, None, given)
        want, _ = reference.route(scores, routing, None, given)
        assert torch.equal(ids, given)
        torch.testing.assert_close(weights, want, atol=1e-6, rtol=1e-5)


def test_the_bias_chooses_and_does_not_weigh(case: Case) -> None:
    kernels, _ = case
    routing = Routing(1, "sigmoid", renormalise=False)
    weights, ids = kernels.route(torch.zeros(1, 4), routing, torch.tensor([0.0, 0, 7, 0]), None)
    assert (ids.item(), weights.item()) == (2, 0.5)


def test_more_groups_than_there_are_are_refused() -> None:
    with pytest.raises(ValueError, match="top_groups is 3, it must be 1 to 2"):
        Routing(2, groups=2, top_groups=3)


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


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrt_softplus"])
def test_rows_do_not_depend_on_one_another(kernels: Kernels, scoring: Scoring) -> None:
    routing = Routing(3, scoring)
    scores = torch.randn(50, 23)
    outputs = torch.randn(50, 3, 47)
    weights, ids = kernels.route(scores, routing, None, None)
    together = kernels.combine(outputs, weights)
    for row in range(50):
        one = slice(row, row + 1)
        alone, chosen = kernels.route(scores[one], routing, None, None)
        assert torch.equal(alone, weights[one])
        assert torch.equal(chosen, ids[one])
        assert torch.equal(kernels.combine(outputs[one], alone), together[one])
