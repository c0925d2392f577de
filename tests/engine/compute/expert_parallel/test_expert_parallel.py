"""Two and four ranks over gloo, each with rows of its own: they get what one rank alone gives."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import dispatch
from services.engine.compute.expert_parallel.bank import ExpertBank
from services.engine.compute.expert_parallel.experts import Experts
from services.engine.compute.ranks.groups import GlooGroup
from services.engine.contract.runner import ExpertPlacement, ExpertShape, RunnerFailedError

# Every rank imports torch: seconds on a free machine.
pytestmark = pytest.mark.timeout(240)

ROW = (6, 1, 4, 3, 6, 0)
"""PR-45's routing: experts that six rows are sent to."""
MAP = (0, 1, 2, 3, 4, 5, 6, 7, 7, 6, 7, 0)
_RANK = """
import sys, torch
from kernels import dispatch
from services.engine.compute.expert_parallel.bank import ExpertBank
from services.engine.compute.expert_parallel.experts import Experts
from services.engine.compute.ranks.groups import GlooGroup
from services.engine.contract.runner import ExpertPlacement, ExpertShape
folder, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
given = torch.load(f"{folder}/given", weights_only=False)
shape = ExpertShape(2, 8, len(given["map"]), size)
placement = ExpertPlacement(0, (given["map"],) * 2, "r")
bank = ExpertBank(given["weights"], dispatch.load("torch"), shape, rank, placement)
group = GlooGroup(f"{folder}/store", rank, size)
experts = Experts(bank, shape, group, 10)
done = []
for number, rows in enumerate(given["cases"]):
    done.append(experts(number % 2, *rows[rank]))
    experts.end_round()
torch.save((done, experts.loads.total()), f"{folder}/done{rank}")
group.close()
"""


def _cases(size: int, make_case) -> list[list[tuple]]:
    """[case][rank] rows: x, ids, weights."""

    def only(rank: int, case: tuple) -> list[tuple]:
        return [case if r == rank else make_case(0, 0, [], 2) for r in range(size)]

    top_1 = [[expert] for expert in ROW]
    return [
        [make_case(6, r, top_1) for r in range(size)],
        [make_case(5 + r, r, [[7]] * (5 + r)) for r in range(size)],
        only(0, make_case(6, 1, [[6, 1], [4, 3], [6, 0], [7, 2], [5, 0], [1, 2]])),
        only(size - 1, make_case(1, 2, [[7, 0]])),
        only(0, make_case(0, 0, [], 2)),
        [make_case(r * 130, r) for r in range(size)],
        [make_case(3, r, [[-1, 6], [-1, -1], [0, -1]]) for r in range(size)],
    ]


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_gets_what_one_rank_alone_would_give(
    size: int, tmp_path: Path, random_experts, make_case
) -> None:
    cases = _cases(size, make_case)
    given = {"weights": random_experts.weights, "map": MAP, "cases": cases}
    torch.save(given, tmp_path / "given")
    ranks = [
        subprocess.Popen([sys.executable, "-c", _RANK, str(tmp_path), str(rank), str(size)])
        for rank in range(size)
    ]
    try:
        assert [rank.wait(150) for rank in ranks] == [0] * size
    finally:
        for rank in ranks:
            rank.kill()
    lone = random_experts.lone()
    total = torch.zeros(2, 8, dtype=torch.long)
    want = torch.zeros(2, 8, dtype=torch.long)
    for rank in range(size):
        done, loads = torch.load(tmp_path / f"done{rank}")
        total += torch.tensor(loads)
        for number, case in enumerate(cases):
            x, ids, weights = case[rank]
            assert torch.equal(done[number], lone(number % 2, x, ids, weights)), number
            dense = random_experts.dense(number % 2, x, ids, weights)
            torch.testing.assert_close(done[number], dense, atol=2e-4, rtol=1e-4)
            want[number % 2] += torch.bincount(ids[ids >= 0], minlength=8)
    assert total.tolist() == want.tolist(), "a row was dropped or counted twice"


def test_a_rank_that_ended_ends_the_call(tmp_path: Path, random_experts, make_case) -> None:
    """No hang: the collective fails on those that are left."""
    code = (
        "import os, sys; from services.engine.compute.ranks.groups import GlooGroup;"
        f"group = GlooGroup({str(tmp_path / 'store')!r}, 1, 2); os._exit(0)"
    )
    other = subprocess.Popen([sys.executable, "-c", code])
    shape = ExpertShape(2, 8, 8, 2)
    placement = ExpertPlacement(0, (tuple(range(8)),) * 2, "r")
    bank = ExpertBank(random_experts.weights, dispatch.load("torch"), shape, 0, placement)
    group = GlooGroup(str(tmp_path / "store"), 0, 2)
    experts = Experts(bank, shape, group, 1)
    assert other.wait(60) == 0
    with pytest.raises(RunnerFailedError, match="rank 0 lost the connection to another rank"):
        experts(0, *make_case(3, 1))
    group.close()
    group.close()
