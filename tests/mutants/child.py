"""Runs pytest in a child of this process, which has imported slow third-party modules already."""

import gc
import importlib.metadata
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.records import ROOT

PRELOADED = (
    *("torch", "numpy", "grpc.aio", "google.protobuf.message", "msgspec", "hypothesis"),
    *("redis.asyncio", "cryptography.x509", "opentelemetry.sdk.trace", "prometheus_client"),
    *("jinja2", "tokenizers"),
)
"""Modules that take long to import. None may start threads; no module of the tree is among them."""
OPTIONS = (
    *("-q", "-x", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-m", "not tools and not gpu"),
    # Plugins that the parent has imported cannot be rewritten.
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),
)
MUST_NOT_RUN = 3
"""Exit code of a child that did not get as far as pytest; pytest's own for an internal error."""


@dataclass(frozen=True)
class Run:
    """How a selection of tests ended."""

    code: int | None
    """pytest's exit code; None if the tests took too long."""
    last: str | None
    """The test that failed, or the one that ran at the end of the time limit."""
    output: str
    """The last lines of pytest's output."""


class _Recorder:
    """A plugin that writes the name of the test that runs; it is the failed one if -x ends here."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self._path.write_text(nodeid)


def preload() -> None:
    """Import the slow modules and pytest's plugins, for all children."""
    for name in PRELOADED:
        importlib.import_module(name)
    for plugin in importlib.metadata.entry_points(group="pytest11"):
        plugin.load()
    gc.freeze()  # children need not look through what they inherit


def run_tests(tests: Sequence[str], tree: Path, limit_s: float) -> Run:
    """Run tests until the first failure. Their processes are killed at the end."""
    log, last = tree / "mutants.log", tree / "mutants.last"
    last.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        _be_pytest(tests, tree, log, last)
    code = _wait(child, time.monotonic() + limit_s)
    output = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
    return Run(code, last.read_text() if last.is_file() else None, output)


def _wait(child: int, until: float) -> int | None:
    code: int | None = None
    while code is None and time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.05)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    if code is None:
        os.waitpid(child, 0)
    return code


def _be_pytest(tests: Sequence[str], tree: Path, log: Path, last: Path) -> None:
    code = MUST_NOT_RUN
    try:
        os.setpgid(0, 0)
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        _enter(tree)
        code = int(pytest.main([*OPTIONS, *tests], plugins=[_Recorder(last)]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _enter(tree: Path) -> None:
    """Import everything from the copy from here on, in this process and in those it starts."""
    os.chdir(tree)
    compiled = str(tree / "compiled")
    os.environ |= {"PYTHONPATH": str(tree), "PYTHONPYCACHEPREFIX": compiled}
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.pycache_prefix, sys.dont_write_bytecode = compiled, False
    sys.path[:] = [str(tree), *(entry for entry in sys.path if entry not in (str(ROOT), ""))]
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
