"""Puts faults into a copy of the tree, one by one, and runs the tests that should notice each.

    python -m tests.mutants                      # all, an hour or two; writes result.json
    python -m tests.mutants --only quotas        # those whose subject or name has the text;
                                                 # the outcomes of the others stay
    python -m tests.mutants --changed            # those that are new in result.json, or whose
                                                 # record, file or tests have changed since
    python -m tests.mutants --changed --others 9 # and nine others at random
    python -m tests.mutants --check              # check the records, run nothing

The exit status is 1 if fewer than 95 % of the faults are caught, if one survives without a reason
or if a record is wrong.
"""

import argparse
import datetime
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tests.mutants import child
from tests.mutants.records import ROOT, Fault, digest_of, problems_of, read_faults
from tests.mutants.score import (
    INVALID,
    Judge,
    Outcome,
    caught_of,
    problems_of_run,
    read_outcomes,
    result_of,
    write_result,
)
from tests.mutants.tree import copy_tree

RESULT = Path(__file__).resolve().parent / "result.json"
NICENESS = 19
LIMIT_S = 300.0
"""For the tests of one fault."""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="check the records, run nothing")
    parser.add_argument("--only", default="", metavar="TEXT", help="faults with it in SUBJECT/NAME")
    parser.add_argument("--changed", action="store_true", help="faults without a valid outcome")
    parser.add_argument("--others", type=int, default=0, metavar="N", help="with --changed: N more")
    parser.add_argument("--result", type=Path, default=RESULT, help="JSON file for the outcomes")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print; the exit status."""
    args = arguments(argv)
    everything = read_faults()
    faults = [f for f in everything if args.only in f"{f.subject}/{f.name}"]
    problems = problems_of(everything)
    if not faults:
        problems = [f"--only: no fault has {args.only!r} in its subject or name"]
    if not problems and not args.check:
        os.nice(NICENESS)
        known = read_outcomes(args.result)
        if args.changed:
            faults = changed_faults(faults, known, args.others)
        for name, outcome in _run(faults, _revision()):
            known[name] = outcome
            write_result(result_of(everything, known, _head()), args.result)
        judged = [fault for fault in everything if fault.name in known]
        print(f"{caught_of(judged, known)} of {len(judged)} faults caught")
        problems = problems_of_run(judged, known)
    print(*problems, sep="\n", end="\n" if problems else "")
    return int(bool(problems))


def changed_faults(
    faults: Sequence[Fault], known: Mapping[str, Outcome], others: int, root: Path = ROOT
) -> list[Fault]:
    """Faults whose outcome is missing or of other code, and `others` more at random."""
    valid = sorted(
        fault.name
        for fault in faults
        if fault.name in known and known[fault.name].digest == digest_of(fault, root)
    )
    again = random.sample(valid, min(others, len(valid)))
    print(f"{len(valid)} outcomes are valid; of these {len(again)} are tried again")
    return [fault for fault in faults if fault.name not in valid or fault.name in again]


def _head() -> dict[str, str]:
    return {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "command": "python -m tests.mutants",
    }


def _run(faults: Sequence[Fault], revision: str) -> Iterator[tuple[str, Outcome]]:
    """Yields each fault's name and outcome."""
    child.preload()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder)
        copy_tree(tree)
        judge = Judge(tree, lambda tests: child.run_tests(tests, tree, LIMIT_S))
        for number, fault in enumerate(faults, 1):
            since = time.monotonic()
            found = judge.judge(fault)
            took = f"{time.monotonic() - since:5.1f} s"
            late = " (too slow with it)" if found.timed_out else ""
            name = f"{fault.subject}/{fault.name}{late}"
            print(f"{number:3}/{len(faults)} {found.outcome:8} {took}  {name}", flush=True)
            if found.outcome == INVALID:
                print(found.test, found.output, sep="\n", flush=True)
            yield fault.name, replace(found, revision=revision, digest=digest_of(fault))


def _revision() -> str:
    def git(*words: str) -> str:
        command = ["git", *words]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return run.stdout.strip()

    changed = git("status", "--porcelain", "--", ":!tests/mutants/result.json")
    return git("rev-parse", "--short", "HEAD") + (" with changes" if changed else "")


if __name__ == "__main__":
    sys.exit(main())
