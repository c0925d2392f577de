"""The faults: records in `faults/*.toml`, one file per subject.

A record has the file, its text without and with the fault, and the smallest selection of tests
that should notice it. The head of a TOML file gives the `file` and `tests` of records without.
"""

import hashlib
import tomllib
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FAULTS = Path(__file__).resolve().parent / "faults"
SUBJECTS = (
    *(
        "deepseek_v4",
        "device_rounds",
        "experts",
        "fencing",
        "formats",
        "memory",
        "models",
        "operations",
        "protocol",
        "quotas",
    ),
    *("resumption", "salts", "sampling", "scheduler", "schemas"),
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
    """All records, by subject, in the order of their files."""
    faults = []
    for path in sorted(folder.glob("*.toml")):
        head = tomllib.loads(path.read_text())
        for record in head["fault"]:
            fields = {"file": head.get("file"), "tests": head.get("tests"), **record}
            fields["tests"] = tuple(fields["tests"])
            faults.append(Fault(subject=path.stem, **fields))
    return faults


def problems_of(faults: Sequence[Fault], root: Path = ROOT) -> list[str]:
    """What is wrong with the records: names that occur twice, texts and tests not in the tree."""
    problems = []
    seen: set[str] = set()
    for fault in faults:
        if fault.name in seen:
            problems.append(f"{_place(fault)}: the name is used twice; choose another")
        seen.add(fault.name)
        problems += _text_problems(fault, root)
        problems += [
            f"{_place(fault)}: there is no test {test}"
            for test in fault.tests
            if not _is_test(test, root)
        ]
    return problems


def digest_of(fault: Fault, root: Path = ROOT) -> str:
    """Identifies what an outcome was found with: record, file and tests, not what these import."""
    files = sorted({fault.file, *(test.split("::")[0] for test in fault.tests)})
    texts = [(root / file).read_bytes() for file in files if (root / file).is_file()]
    digest = hashlib.sha256(repr(astuple(fault)).encode())
    for text in texts:
        digest.update(hashlib.sha256(text).digest())
    return digest.hexdigest()[:16]


def _place(fault: Fault) -> str:
    return f"{fault.subject}.toml, {fault.name!r}"


def _text_problems(fault: Fault, root: Path) -> list[str]:
    if fault.old == fault.new:
        return [f"{_place(fault)}: `old` and `new` are the same"]
    path = root / fault.file
    if not path.is_file():
        return [f"{_place(fault)}: there is no file {fault.file}"]
    times = path.read_text().count(fault.old)
    if times == 1:
        return []
    return [
        f"{_place(fault)}: {fault.file} has the text of `old` {times} times, expected once; "
        "write the record for the code as it is now"
    ]


def _is_test(test: str, root: Path) -> bool:
    file, *names = test.split("::")
    if not (root / file).is_file():
        return False
    source = (root / file).read_text()
    return all(name.split("[")[0] in source for name in names)
