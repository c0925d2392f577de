"""Dispatch, compute, combine on one rank against a loop over rows and experts."""

import pytest
import torch

from services.engine.contract.runner import ExpertPlacement

MAP = (7, 7, 3, 2, 1, 0, 4, 5, 6, 7)


@pytest.mark.parametrize(
    ("rows", "ids"),
    [
        (0, []),
        (1, [[6, 1]]),
        (3, [[6, 1], [4, 3], [6, 0]]),
        (5, [[7]] * 5),
        (4, [[-1, -1], [2, -1], [-1, 2], [0, 1]]),
        (130, [[7, 1]] * 130),
        (90, None),
    ],
    ids=str,
)
def test_outputs_equal_the_plain_loop_under_every_map(
    rows: int, ids, random_experts, make_case
) -> None:
    x, ids, weights = make_case(rows, 1, ids)
    lone = random_experts.lone()
    spread = random_experts.lone(2, ExpertPlacement(0, (MAP, MAP[::-1]), "r"))
    for layer in range(2):
        got = lone(layer, x, ids, weights)
        want = random_experts.dense(layer, x, ids, weights)
        torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)
        for _ in range(3):  # replicas take turns; no turn may change a bit
            assert torch.equal(spread(layer, x, ids, weights), got)
            spread.end_round()


def test_rows_without_an_expert_are_neither_computed_nor_counted(random_experts, make_case) -> None:
    experts = random_experts.lone(2)
    x, ids, weights = make_case(4, 2, [[-1, 3], [3, -1], [-1, -1], [0, 3]])
    got = experts(0, x, ids, weights)
    experts.end_round()
    assert not got[2].any()
    assert experts.loads.total() == ((1, 0, 0, 3, 0, 0, 0, 0), (0,) * 8)


def test_a_new_map_is_used_after_it_is_applied_and_not_before(random_experts, make_case) -> None:
    experts = random_experts.lone(2)
    x, ids, weights = make_case(50, 3)
    want = experts(1, x, ids, weights)
    new = ExpertPlacement(4, (MAP, MAP), "r")
    experts.bank.start_placement(new)
    experts.bank.prepare()
    assert experts.placement.version == 0
    assert torch.equal(experts(1, x, ids, weights), want)
    experts.end_round()
    experts.apply()
    assert experts.placement == new
    assert torch.equal(experts(1, x, ids, weights), want)
    experts.end_round()
    counts = torch.bincount(ids.flatten(), minlength=8)
    assert experts.loads.total()[1] == tuple((3 * counts).tolist())
