"""A scratch copy of the tree: faults are put in there, never into the working tree."""

import compileall
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.mutants.records import ROOT, Fault


def copy_tree(target: Path, root: Path = ROOT) -> None:
    """Copy and compile the files that git tracks or would track."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        source = root / name
        if source.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target / name)
    compileall.compile_dir(target, quiet=2)


@contextmanager
def applied(fault: Fault, tree: Path) -> Iterator[None]:
    """The fault is in the tree until the context ends."""
    path = tree / fault.file
    before, times = path.read_text(), path.stat()
    path.write_text(before.replace(fault.old, fault.new))
    try:
        yield
    finally:
        path.write_text(before)
        # What was compiled of it is valid again.
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
