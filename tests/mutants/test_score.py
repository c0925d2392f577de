"""When a fault counts as caught: only if the test that failed passes without it."""

import pytest

from tests.mutants.child import Run
from tests.mutants.records import Fault
from tests.mutants.score import (
    Judge,
    Outcome,
    problems_of_run,
    read_outcomes,
    result_of,
    write_result,
)

PASSES, FAILS = Run(0, "t::a", ""), Run(1, "t::a", "1 failed")
HANGS, SLOW = Run(None, "t::a", ""), Run(1, "t::a", "Failed: Timeout (>60.0s) from pytest-timeout.")
NO_TESTS, NOT_COLLECTED = Run(5, None, "no tests ran"), Run(2, None, "1 error")


def fault(name: str, survives: str | None = None) -> Fault:
    return Fault("s", name, "source.py", "a = 1", "a = 2", ("t",), survives)


class Tree:
    """A tree whose tests end as they are listed: with the fault, and without it."""

    def __init__(self, path, with_fault: Run, without: Run) -> None:
        self.source = path / "source.py"
        self.source.write_text("a = 1\n")
        self.runs: list[tuple[str, ...]] = []
        self._ends = {"a = 2\n": with_fault, "a = 1\n": without}
        self.judge = Judge(path, self._run)

    def _run(self, tests):
        self.runs.append(tuple(tests))
        return self._ends[self.source.read_text()]


@pytest.mark.parametrize(
    ("with_fault", "without", "outcome", "timed_out"),
    [
        (PASSES, PASSES, "survived", False),
        (FAILS, PASSES, "caught", False),
        (FAILS, FAILS, "invalid", False),
        (HANGS, PASSES, "caught", True),
        (HANGS, HANGS, "invalid", True),
        (SLOW, SLOW, "invalid", True),
        (NO_TESTS, PASSES, "invalid", False),
        (NOT_COLLECTED, PASSES, "invalid", False),
    ],
)
def test_what_counts_as_caught(tmp_path, with_fault, without, outcome, timed_out):
    tree = Tree(tmp_path, with_fault, without)
    found = tree.judge.judge(fault("one"))
    assert (found.outcome, found.timed_out) == (outcome, timed_out)
    assert tree.source.read_text() == "a = 1\n"


@pytest.mark.parametrize(("with_fault", "times"), [(FAILS, 1), (SLOW, 2)])
def test_a_failed_test_is_run_without_fault_once_and_a_slow_one_every_time(
    tmp_path, with_fault, times
):
    tree = Tree(tmp_path, with_fault, PASSES)
    for name in ("one", "two"):
        assert tree.judge.judge(fault(name)).outcome == "caught"
    assert tree.runs.count(("t",)) == 2
    assert tree.runs.count(("t::a",)) == times


def test_a_run_is_good_if_95_percent_are_caught_and_survivors_have_a_reason(tmp_path):
    faults = [fault(str(number)) for number in range(19)] + [fault("known", "nothing shows it")]
    outcomes = {f.name: Outcome("caught", "t::a") for f in faults}
    outcomes["known"] = Outcome("survived")
    assert problems_of_run(faults, outcomes) == []
    result = result_of(faults, outcomes, {"date": "today"})
    assert (result["faults"], result["caught"]) == (20, 19)
    assert result["survivors"] == {"known": "nothing shows it"}
    path = tmp_path / "result.json"
    assert read_outcomes(path) == {}
    write_result(result, path)
    assert read_outcomes(path) == outcomes
    outcomes["0"] = Outcome("survived")
    few, unknown = problems_of_run(faults, outcomes)
    assert few.startswith("90.0% of the faults are caught")
    assert unknown.startswith("0: no test notices it")


@pytest.mark.parametrize(
    ("outcome", "survives", "problem"),
    [("invalid", None, "its tests prove nothing"), ("caught", "no reason", "remove `survives`")],
)
def test_other_problems_of_a_run_are_named(outcome, survives, problem):
    faults = [fault(str(number)) for number in range(20)] + [fault("odd", survives)]
    outcomes = {f.name: Outcome("caught", "t::a") for f in faults}
    outcomes["odd"] = Outcome(outcome)
    assert [problem in found for found in problems_of_run(faults, outcomes)] == [True]
