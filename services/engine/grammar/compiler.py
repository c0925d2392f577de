"""The engine's handle on the grammar compiler: one job at a time, killed when it takes too long."""

import subprocess
import sys
import threading
from typing import IO

from services.engine.grammar.wire import Job, Outcome, Setup, read_frame, write_frame


class GrammarCompiler:
    """Owns the compiler's process; used by one thread, except `close`."""

    def __init__(self, setup: Setup, *, timeout_s: float) -> None:
        self._setup = setup
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._number = 0

    def compile(self, kind: str, text: str, choices: tuple[str, ...]) -> Outcome:
        """Compile one constraint; a failure is a value with `problem`, never an exception."""
        self._number += 1
        job = Job(self._number, kind, text, choices)
        process = self._running()
        if process is None:
            return Outcome(job.number, problem="the grammar compiler is not available")
        killed = threading.Event()

        def give_up() -> None:
            killed.set()
            process.kill()

        timer = threading.Timer(self._timeout_s, give_up)
        timer.start()
        try:
            outcome = _ask(process, job)
        finally:
            timer.cancel()
        if outcome is not None:
            return outcome
        self._discard(process)
        if killed.is_set():
            return Outcome(
                job.number, problem=f"takes longer than {self._timeout_s:g} s to compile"
            )
        return Outcome(job.number, problem="crashed the grammar compiler")

    def close(self) -> None:
        """Kill the process, also in the middle of a job; idempotent."""
        with self._lock:
            self._closed = True
            process = self._process
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    _close_quietly(stream)

    def _running(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            if self._closed:
                return None
            if self._process is None:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "services.engine.grammar.compiler_main"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
                fresh = True
            else:
                fresh = False
            process = self._process
        if fresh and _ask(process, self._setup) is None:
            self._discard(process)
            return None
        return process

    def _discard(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                _close_quietly(stream)
        with self._lock:
            if self._process is process:
                self._process = None


def _ask(process: subprocess.Popen[bytes], message: Setup | Job) -> Outcome | None:
    """One frame out, one in; None if the process died."""
    if process.stdin is None or process.stdout is None:
        return None
    try:
        write_frame(process.stdin, message)
        return read_frame(process.stdout, Outcome)
    except (OSError, ValueError):
        return None


def _close_quietly(stream: IO[bytes]) -> None:
    try:
        stream.close()
    except OSError:
        return
