"""Without numba, as on all but x86-64 Linux, nothing is compiled and the set `torch` is used."""

import subprocess
import sys

import pytest

_SCRIPT = """
import importlib.abc, platform, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("numba", "llvmlite"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
platform.machine = lambda: {machine!r}
from kernels import dispatch
print([dispatch.compiled_set("cpu", dtype, (64, 32)) for dtype in ("float32", "int8")])
import runpy
runpy.run_module("kernels.compiled", run_name="__main__")
"""


@pytest.mark.parametrize("machine", ["aarch64", "arm64"])
def test_nothing_is_compiled_or_imported(machine: str) -> None:
    command = [sys.executable, "-c", _SCRIPT.format(machine=machine)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[None, None]"), done.stderr
