"""Decides whether a fault was caught, and what the score of a whole run is."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.mutants.child import Run
from tests.mutants.records import Fault
from tests.mutants.tree import applied

LEAST_CAUGHT = 0.95
CAUGHT, SURVIVED, INVALID = "caught", "survived", "invalid"
PASSED, FAILED = 0, 1  # exit codes of pytest

RunTests = Callable[[Sequence[str]], Run]


@dataclass(frozen=True)
class Outcome:
    """What became of one fault."""

    outcome: str
    """`caught`: `test` fails with the fault and passes without it. `survived`: all tests pass.
    `invalid`: the tests do not run with the fault, or `test` fails without it too."""
    test: str | None = None
    timed_out: bool = False
    """With the fault the test did not end in time; without it, it did."""
    output: str = ""
    """The end of pytest's output if the record is invalid."""
    revision: str = ""
    """Of the tree that was judged; a run of some faults leaves the outcomes of the others."""
    digest: str = ""
    """`digest_of` the fault in that tree."""


class Judge:
    """Runs the tests of faults in a copy of the tree."""

    def __init__(self, tree: Path, run_tests: RunTests) -> None:
        self._tree = tree
        self._run_tests = run_tests
        self._known_to_pass: set[str] = set()

    def judge(self, fault: Fault) -> Outcome:
        """Run the tests with the fault, and the one that failed without it."""
        with applied(fault, self._tree):
            run = self._run_tests(fault.tests)
        if run.code == PASSED:
            return Outcome(SURVIVED)
        timed_out = run.code is None or "from pytest-timeout" in run.output
        if run.last is None or run.code not in (FAILED, None):
            return Outcome(INVALID, run.last, timed_out, run.output)
        # A test that was slow may be so because of the machine: it is tried again every time.
        if timed_out or run.last not in self._known_to_pass:
            without = self._run_tests([run.last])
            if without.code != PASSED:
                return Outcome(INVALID, run.last, timed_out, without.output)
            self._known_to_pass.add(run.last)
        return Outcome(CAUGHT, run.last, timed_out)


def caught_of(faults: Sequence[Fault], outcomes: Mapping[str, Outcome]) -> int:
    """How many of the faults were caught."""
    return sum(outcomes[fault.name].outcome == CAUGHT for fault in faults)


def result_of(
    faults: Sequence[Fault], outcomes: Mapping[str, Outcome], head: Mapping[str, Any]
) -> dict[str, Any]:
    """The JSON result of a run."""
    known = [fault for fault in faults if fault.name in outcomes]
    survivors = [fault for fault in known if outcomes[fault.name].outcome == SURVIVED]
    return {
        **head,
        "faults": len(faults),
        "caught": caught_of(known, outcomes),
        "survivors": {fault.name: fault.survives or "no reason is given" for fault in survivors},
        "outcomes": {
            subject: {
                fault.name: {k: v for k, v in asdict(outcomes[fault.name]).items() if v}
                for fault in known
                if fault.subject == subject
            }
            for subject in sorted({fault.subject for fault in faults})
        },
    }


def read_outcomes(path: Path) -> dict[str, Outcome]:
    """The outcomes in a result by the fault's name; none if there is no such file."""
    subjects = json.loads(path.read_text())["outcomes"] if path.is_file() else {}
    return {name: Outcome(**found) for group in subjects.values() for name, found in group.items()}


def write_result(result: Mapping[str, Any], path: Path) -> None:
    """Write a result for readers and for comparison by line."""
    path.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")


def problems_of_run(faults: Sequence[Fault], outcomes: Mapping[str, Outcome]) -> list[str]:
    """What must be mended; empty if the score is reached and every survivor has a reason."""
    problems = []
    caught = caught_of(faults, outcomes)
    if caught < LEAST_CAUGHT * len(faults):
        share = caught / max(len(faults), 1)
        problems.append(f"{share:.1%} of the faults are caught, {LEAST_CAUGHT:.0%} are needed")
    for fault in faults:
        found = outcomes[fault.name].outcome
        if found == INVALID:
            problems.append(f"{fault.name}: its tests prove nothing; correct the record")
        elif found == SURVIVED and fault.survives is None:
            problems.append(f"{fault.name}: no test notices it; write one, or give `survives`")
        elif found == CAUGHT and fault.survives is not None:
            problems.append(f"{fault.name}: it is caught; remove `survives`")
    return problems
