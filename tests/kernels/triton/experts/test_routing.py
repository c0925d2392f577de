"""Routing and combination in Triton beside their formulas."""

import pytest
import torch

from kernels import reference
from kernels.interface import Routing
from kernels.triton.experts.combine import combine
from kernels.triton.experts.routing import route

ORACLE = reference.KERNELS
# A weight that is a rounded share of the row's sum; exp and log differ in their last bits.
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("rows", "experts", "top_k"), [(0, 8, 2), (1, 1, 1), (3, 21, 5)])
def test_softmax(rows, experts, top_k, renormalise, dtype):
    torch.manual_seed(rows)
    scores = (torch.randn(rows, 2 * experts) * 3).to(dtype)[:, :experts]
    routing = Routing(top_k, renormalise=renormalise, scale=1.5)
    weights, ids = route(scores, routing)
    want, chosen = ORACLE.route(scores, routing, None, None)
    assert torch.equal(ids, chosen)
    torch.testing.assert_close(weights, want, rtol=LIMITS[dtype], atol=1e-7)


@pytest.mark.parametrize("scoring", ["sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (4, 2), (3, 2)])
def test_bias_and_groups(scoring, groups, top_groups):
    torch.manual_seed(groups)
    scores, bias = torch.randn(4, 24) * 3, torch.randn(24)
    routing = Routing(5, scoring, scale=2.5, groups=groups, top_groups=top_groups)
    weights, ids = route(scores, routing, bias)
    want, chosen = ORACLE.route(scores, routing, bias, None)
    assert torch.equal(ids, chosen)
    torch.testing.assert_close(weights, want, rtol=2e-6, atol=1e-7)


def test_given_experts_are_weighed_only():
    scores = torch.randn(4, 10) * 8
    scores[0] = torch.tensor([-80.0, -30, -20, -10, 0, 10, 20, 30, 60, 90])
    given = torch.stack([torch.randperm(10)[:7] for _ in range(4)])
    routing = Routing(7, "sqrt_softplus", renormalise=False, scale=1.5)
    weights, ids = route(scores, routing, None, given)
    assert torch.equal(ids, given)
    exact = torch.log1p(scores.double().exp()).sqrt().gather(1, given) * 1.5
    torch.testing.assert_close(weights.double(), exact, rtol=2e-6, atol=1e-18)


def test_ties_go_to_the_lowest_expert_and_nan_to_its_own_row():
    scores = torch.zeros(3, 12)
    scores[1] = float("nan")
    scores[2, 7] = float("nan")
    routing = Routing(3, "sigmoid", groups=2, top_groups=1)
    weights, ids = route(scores, routing, torch.zeros(12))
    assert ids[0].tolist() == ids[2].tolist() == [0, 1, 2]
    assert len(set(ids[1].tolist())) == 3
    assert ids.min() >= 0
    assert ids.max() < 12
    assert weights[1].isnan().all()
    assert torch.equal(weights[0], weights[2])


def test_what_does_not_fit_is_refused():
    scores, routing = torch.zeros(2, 8), Routing(3, groups=4, top_groups=1)
    with pytest.raises(ValueError, match="top_k is 3, but only 2 of 8"):
        route(scores, routing)
    with pytest.raises(ValueError, match="multiple of 4 groups"):
        route(scores[:, :6], routing)
    with pytest.raises(ValueError, match="bias must be contiguous float32"):
        route(scores, Routing(1), torch.zeros(7))
    with pytest.raises(ValueError, match="chosen must be contiguous int64"):
        route(scores, Routing(1), None, torch.zeros(2, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_combine_skips_what_was_never_computed(dtype):
    outputs, weights = torch.randn(3, 4, 1100).to(dtype), torch.rand(3, 4)
    want = outputs.clone()
    ids = torch.arange(12).view(3, 4)
    ids[1, 2] = -1
    want[1, 2] = 0
    outputs[1, 2] = float("nan")
    exact = torch.einsum("tkn,tk->tn", want.double(), weights.double())
    unit = 2.0**-24 if dtype == torch.float32 else 2.0**-8
    limit = torch.einsum("tkn,tk->tn", want.double().abs(), weights.double())
    off = (combine(outputs, weights, ids).double() - exact).abs()
    assert (off <= limit * (4 * 2.0**-23 + unit)).all()


def test_combine_adds_in_the_order_of_columns():
    """2**24 + 1 is 2**24 in float32: only the given order keeps both ones."""
    weights = torch.tensor([[1.0, 1.0, 2.0**24]])
    assert combine(torch.ones(1, 3, 4), weights)[0, 0].item() == 2**24 + 2
    assert combine(torch.ones(1, 3, 4), weights.flip(1))[0, 0].item() == 2**24
