"""The engine's side of the grammar compiler: one job at a time, killed when it exceeds its time."""

import contextlib
import logging
import subprocess
import sys
import threading
import time
from typing import TypeVar

from services.engine.contract.sampling_params import Constraint
from services.engine.grammar.wire import (
    TOO_COSTLY,
    UNAVAILABLE,
    Job,
    Outcome,
    Ready,
    Setup,
    read_frame,
    write_frame,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

_START_S = 180.0
_ATTEMPTS = 2

Process = subprocess.Popen[bytes]


class GrammarCompiler:
    """Owns the compiler's process. One thread calls all methods; any thread may call `close`."""

    def __init__(self, setup: Setup, *, timeout_s: float) -> None:
        self.ready: Ready | None = None
        """The first message of the process; every later process sends the same."""
        self._setup = setup
        self._timeout_s = timeout_s
        self._process: Process | None = None
        self._is_set_up = False
        self._lock = threading.Lock()
        self._closed = False
        self._number = 0

    def prepare(self) -> None:
        """Start the process if none runs, without waiting until it is ready."""
        with self._lock:
            if self._process is None and not self._closed:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "services.engine.grammar.compiler_main"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
                self._is_set_up = False

    def compile(self, constraint: Constraint) -> Outcome:
        """Compile one constraint; a failure is an outcome with `problem`, never an exception.

        If the process dies, the job is tried once more by a new process in the time that is left,
        because the job need not be the cause.
        """
        left_s = self._timeout_s
        for _ in range(_ATTEMPTS):
            process = self._ensure_started()
            if process is None:
                return self._failed("the grammar compiler is not available", UNAVAILABLE)
            self._number += 1
            job = Job(self._number, constraint.kind, constraint.text, constraint.choices)
            began = time.monotonic()
            outcome = _exchange(process, job, Outcome, left_s)
            if outcome is not None:
                return outcome
            self.stop()
            left_s -= time.monotonic() - began
            if left_s <= 0:
                limit = f"takes longer than {self._timeout_s:g} s to compile"
                return self._failed(limit, TOO_COSTLY)
        return self._failed("crashes the grammar compiler", TOO_COSTLY)

    def stop(self) -> None:
        """End the process; the next job starts a new one."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            _kill(process)

    def close(self) -> None:
        """End the process for good, even during a job; idempotent."""
        with self._lock:
            self._closed = True
        self.stop()

    def _ensure_started(self) -> Process | None:
        self.prepare()
        process = self._process
        if process is None or self._is_set_up:
            return process
        ready = _exchange(process, self._setup, Ready, _START_S)
        if ready is None:
            log.warning(
                "the grammar compiler's process did not start within %g s, or died", _START_S
            )
            self.stop()
            return None
        self.ready, self._is_set_up = ready, True
        return process

    def _failed(self, problem: str, reason: str) -> Outcome:
        return Outcome(self._number, problem=problem, reason=reason)


def _exchange(
    process: Process, message: Setup | Job, answer: type[T], timeout_s: float
) -> T | None:
    """Write one frame and read the answer; None if the process died or exceeded the timeout."""
    if process.stdin is None or process.stdout is None:
        return None
    timer = threading.Timer(timeout_s, process.kill)
    timer.daemon = True
    timer.start()
    try:
        write_frame(process.stdin, message)
        return read_frame(process.stdout, answer)
    except (OSError, ValueError):
        return None
    finally:
        timer.cancel()


def _kill(process: Process) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()
