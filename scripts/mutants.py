"""`make mutants`: puts one hundred faults into a copy of the tree and runs the tests that should fail.

Faults are records in tests/mutants/faults/*.toml, one file per subject: the file, its text without
and with the fault, and the tests to run. The working tree is never changed. A fault that no test
notices needs a test, or a `survives` with the reason.
"""

import argparse
import importlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FAULTS = ROOT / "tests/mutants/faults"
RESULT = ROOT / "tests/mutants/result.json"
LEAST_CAUGHT = 0.95
NICE = 15
LIMIT_S = 240.0
"""Of one fault's tests. A fault that makes them hang is caught."""
BASELINE_LIMIT_S = 1800.0
PASSED, FAILED = 0, 1  # exit codes of pytest
# Third-party modules that take long to import. Nothing of the tree may be among them.
PRELOADED = ("torch", "numpy", "grpc", "msgspec")
OPTIONS = (
    *("-q", "-x", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-m", "not tools and not gpu"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),
)


@dataclass(frozen=True)
class Fault:
    """One record."""

    subject: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    survives: str | None = None
    """Why no test can notice it; None if a test must."""


def read_faults(folder: Path = FAULTS) -> list[Fault]:
    """All records; a record without `file` or `tests` takes those of the head of its file."""
    faults = []
    for path in sorted(folder.glob("*.toml")):
        listed = tomllib.loads(path.read_text())
        for record in listed["fault"]:
            fields = {"file": listed.get("file"), "tests": listed.get("tests"), **record}
            fields["tests"] = tuple(fields["tests"])
            faults.append(Fault(subject=path.stem, **fields))
    return faults


def problems_of(faults: Sequence[Fault], root: Path = ROOT) -> list[str]:
    """What is wrong with the records: names, texts and tests that are not in the tree once."""
    problems = []
    seen: set[str] = set()
    for fault in faults:
        where = f"{fault.subject}.toml, {fault.name}"
        if fault.name in seen:
            problems.append(f"{where}: the name is used twice")
        seen.add(fault.name)
        path = root / fault.file
        times = path.read_text().count(fault.old) if path.is_file() else 0
        if times != 1:
            problems.append(f"{where}: {fault.file} has the text {times} times, expected once")
        if fault.old == fault.new:
            problems.append(f"{where}: old and new are the same")
        for test in fault.tests:
            file, *names = test.split("::")
            source = (root / file).read_text() if (root / file).is_file() else ""
            if not source or any(name.split("[")[0] not in source for name in names):
                problems.append(f"{where}: there is no test {test}")
    return problems


def copy_tree(target: Path) -> None:
    """Copy the files that git tracks or would track, and what Python has compiled of them."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        source = ROOT / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
            compiled = _compiled(source)
            if source.suffix == ".py" and compiled.is_file():
                copied = _compiled(target / name)
                copied.parent.mkdir(exist_ok=True)
                shutil.copy2(compiled, copied)


def _compiled(source: Path) -> Path:
    return Path(importlib.util.cache_from_source(str(source)))


@contextmanager
def applied(fault: Fault, tree: Path) -> Iterator[None]:
    """The fault is in the tree until the context ends."""
    path = tree / fault.file
    before, times = path.read_text(), path.stat()
    compiled = _compiled(path)
    aside = compiled.with_suffix(".aside")
    if compiled.is_file():
        compiled.rename(aside)
    path.write_text(before.replace(fault.old, fault.new))
    try:
        yield
    finally:
        path.write_text(before)
        # What was compiled of it is valid again.
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        if aside.is_file():
            aside.rename(compiled)


def run_tests(tests: Sequence[str], tree: Path, limit_s: float) -> tuple[int | None, str]:
    """Run tests in a child of this process, which has the slow imports already.

    Returns pytest's exit code, None if they took too long, and the output's last lines.
    """
    log = tree / "mutants.log"
    child = os.fork()
    if child == 0:
        _be_pytest(tests, tree, log)
    until = time.monotonic() + limit_s
    code: int | None = None
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if code is None:
        os.waitpid(child, 0)
    return code, "\n".join(log.read_text(errors="replace").splitlines()[-12:])


def _be_pytest(tests: Sequence[str], tree: Path, log: Path) -> None:
    code = 3
    try:
        os.setpgid(0, 0)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree)
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        sys.dont_write_bytecode = True
        here = {str(ROOT), str(ROOT / "scripts"), ""}
        sys.path[:] = [str(tree), *(entry for entry in sys.path if entry not in here)]
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        code = int(importlib.import_module("pytest").main([*OPTIONS, *tests]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def check_baseline(faults: Sequence[Fault], tree: Path) -> str | None:
    """Run all selected tests without a fault; returns the output if one does not pass."""
    tests = sorted({test for fault in faults for test in fault.tests})
    whole = {test for test in tests if "::" not in test}
    wanted = [test for test in tests if test in whole or test.split("::")[0] not in whole]
    code, output = run_tests(wanted, tree, BASELINE_LIMIT_S)
    return None if code == PASSED else output or "the tests took too long"


def outcome_of(fault: Fault, tree: Path) -> tuple[str, str]:
    """"caught", "survived" or "broken" (the tests did not even run), and the output's end."""
    with applied(fault, tree):
        code, output = run_tests(fault.tests, tree, LIMIT_S)
    return {FAILED: "caught", None: "caught", PASSED: "survived"}.get(code, "broken"), output


def save_result(faults: Sequence[Fault], outcomes: Mapping[str, str], path: Path) -> None:
    """Write the outcomes into the result; those of faults that did not run now stay."""
    known: dict[str, str] = json.loads(path.read_text())["outcomes"] if path.is_file() else {}
    known = {f.name: known[f.name] for f in faults if f.name in known} | dict(outcomes)
    result = {
        "faults": len(faults),
        "caught": list(known.values()).count("caught"),
        "not run": len(faults) - len(known),
        "survivors": {
            fault.name: fault.survives or "no reason is given"
            for fault in faults
            if known.get(fault.name) == "survived"
        },
        "outcomes": {fault.name: known[fault.name] for fault in faults if fault.name in known},
    }
    path.write_text(json.dumps(result, indent=2) + "\n")


def verdict_of(faults: Sequence[Fault], outcomes: Sequence[str]) -> list[str]:
    """What must be mended; empty if the score is reached and every survivor has a reason."""
    wrong = []
    share = outcomes.count("caught") / max(len(outcomes), 1)
    if share < LEAST_CAUGHT:
        wrong.append(f"{share:.0%} of the faults are caught, {LEAST_CAUGHT:.0%} are needed")
    for fault, outcome in zip(faults, outcomes, strict=True):
        if outcome == "broken":
            wrong.append(f"{fault.name}: its tests cannot run; correct the record")
        elif outcome == "survived" and fault.survives is None:
            wrong.append(f"{fault.name}: no test notices it; write one, or give `survives`")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="check the records, run nothing")
    parser.add_argument("--only", default="", metavar="TEXT", help="faults whose name or subject has it")
    parser.add_argument("--no-baseline", action="store_true", help="do not run the tests first")
    parser.add_argument("--result", type=Path, default=RESULT, help="JSON file that takes the outcomes")
    options = parser.parse_args(arguments)
    everything = read_faults()
    faults = [f for f in everything if options.only in f"{f.subject}/{f.name}"]
    problems = problems_of(faults)
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems or options.check:
        return int(bool(problems))
    os.nice(max(0, NICE - os.nice(0)))
    if any("tests/engine" in test for fault in faults for test in fault.tests):
        for name in PRELOADED:
            importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        return _run_all(faults, everything, Path(folder), options)


def _run_all(
    faults: Sequence[Fault], everything: Sequence[Fault], tree: Path, options: argparse.Namespace
) -> int:
    copy_tree(tree)
    if not options.no_baseline:
        failed = check_baseline(faults, tree)
        if failed is not None:
            print(f"the tests fail without any fault:\n{failed}", file=sys.stderr)
            return 1
    outcomes = []
    for number, fault in enumerate(faults, 1):
        began = time.monotonic()
        outcome, output = outcome_of(fault, tree)
        outcomes.append(outcome)
        took_s = time.monotonic() - began
        name = f"{fault.subject}/{fault.name}"
        print(f"{number:3}/{len(faults)} {outcome:8} {took_s:5.1f} s  {name}", flush=True)
        if outcome == "broken":
            print(output, flush=True)
        save_result(everything, {fault.name: outcome}, options.result)
    wrong = verdict_of(faults, outcomes)
    print(f"{outcomes.count('caught')} of {len(outcomes)} faults caught", *wrong, sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
