"""A scratch copy of the tree: faults are put in there, never into the working tree."""

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.mutants.records import ROOT, Fault

_times = itertools.count(1)


def copy_tree(target: Path, root: Path = ROOT) -> None:
    """Copy the files that git tracks or would track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        source = root / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)


@contextmanager
def applied(fault: Fault, tree: Path) -> Iterator[None]:
    """The fault is in the tree until the context ends."""
    path = tree / fault.file
    before = path.read_text()
    _replace(path, before.replace(fault.old, fault.new))
    try:
        yield
    finally:
        _replace(path, before)


def _replace(path: Path, text: str) -> None:
    path.write_text(text)
    # Python uses what it has compiled of a text with the same time in seconds and the same length.
    seconds = next(_times)
    os.utime(path, (seconds, seconds))
