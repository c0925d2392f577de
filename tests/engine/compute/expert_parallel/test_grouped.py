"""Experts of one process on a set that runs a layer's in one call: outputs, counts, placements."""

import pytest
import torch

from kernels import reference
from services.engine.compute.expert_parallel.grouped import GroupedExperts
from services.engine.contract.runner import ExpertPlacement, ExpertShape, PlacementRefusedError

SHAPE = ExpertShape(num_layers=2, num_experts=8, num_slots=10, num_ranks=1)
MAP = ((0, 1, 2, 3, 4, 5, 6, 7, 0, 1),) * 2
NONE = [0] * 8


@pytest.fixture
def experts(random_experts) -> GroupedExperts:
    kernels = reference.KERNELS.experts
    assert kernels is not None
    return GroupedExperts(SHAPE, "r", 2, random_experts.weights, kernels)


def run(experts, make_case, rows: int, seed: int):
    """One round; the layers' outputs and choices."""
    cases = [make_case(rows, seed + layer) for layer in range(SHAPE.num_layers)]
    with experts.round():
        out = [experts.run_experts(layer, *case) for layer, case in enumerate(cases)]
    return out, cases


def counts(cases) -> torch.Tensor:
    return torch.stack([torch.bincount(ids.flatten(), minlength=8) for _, ids, _ in cases])


def test_every_layer_has_its_own_experts(experts, random_experts, make_case):
    out, cases = run(experts, make_case, 5, 1)
    for layer, (x, ids, weights) in enumerate(cases):
        want = random_experts.dense(layer, x, ids, weights)
        torch.testing.assert_close(out[layer], want, rtol=1e-4, atol=1e-4)
    assert experts.nbytes == sum(own.nbytes for own in random_experts.weights.weights.values())


def test_counts_are_those_of_the_last_rounds(experts, make_case):
    rounds = [counts(run(experts, make_case, rows, rows)[1]) for rows in (3, 4, 5)]
    assert experts.loads() == tuple(map(tuple, (rounds[1] + rounds[2]).tolist()))
    experts.clear_loads()
    assert experts.loads() == (tuple(NONE), tuple(NONE))
    last = counts(run(experts, make_case, 2, 9)[1])
    assert experts.loads() == tuple(map(tuple, last.tolist()))


def test_a_round_that_failed_is_not_counted(experts, make_case):
    case = make_case(3, 1)
    with pytest.raises(ZeroDivisionError), experts.round():
        experts.run_experts(0, *case)[0].fill_(1 // 0)
    last = counts(run(experts, make_case, 2, 9)[1])
    assert experts.loads() == tuple(map(tuple, last.tolist()))


def test_a_placement_is_taken_and_moves_nothing(experts, make_case):
    before, _ = run(experts, make_case, 4, 2)
    assert experts.prepare(ExpertPlacement(1, MAP, "r"))
    experts.apply(1)
    assert experts.placement.version == 1
    after, _ = run(experts, make_case, 4, 2)
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    with pytest.raises(PlacementRefusedError, match="has 8 slots"):
        experts.prepare(ExpertPlacement(2, (MAP[0][:8],) * 2, "r"))
