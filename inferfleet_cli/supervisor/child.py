"""Runs one service as a child process and restarts it with back-off when it ends."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inferfleet_cli.errors import CliError
from inferfleet_cli.supervisor.dev_backends import tied_to_parent
from inferfleet_cli.supervisor.options import ServicePlan

POLL_S = 0.05
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
GOOD_RUN_S = 60.0
"""After a run of this length the count of failures in a row starts at 1 again."""
LOG_TAIL_LINES = 12


def restart_delay_s(failures: int) -> float:
    """Seconds to wait before the next start, after `failures` in a row (the first counts as 1).

    None after the first: what was ready before is most likely ready again.
    """
    return 0.0 if failures < 2 else float(min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (failures - 2)))


def when_text(delay_s: float) -> str:
    """When something starts again, for a message."""
    return f"in {delay_s:g} s" if delay_s else "now"


@dataclass(frozen=True)
class ChildStatus:
    """The state of one process, as `status` shows it."""

    name: str
    state: str
    pid: int | None
    address: str
    metrics_address: str
    restarts: int
    uptime_s: float


class Child:
    """Owns one service: its present process and those that replace it."""

    def __init__(
        self,
        plan: ServicePlan,
        *,
        log_file: Path,
        ready_file: Path,
        cwd: Path,
        on_event: Callable[[str], None],
        delay_s: Callable[[int], float] = restart_delay_s,
    ) -> None:
        """`delay_s` maps the failures in a row to the seconds before the next start."""
        self.name = plan.name
        self._delay_s = delay_s
        self._argv = plan.argv
        self._log_file = log_file
        self._ready_file = ready_file
        self._cwd = cwd
        self._on_event = on_event
        self._process: asyncio.subprocess.Process | None = None
        self._keep_task: asyncio.Task[None] | None = None
        self._ready: dict[str, Any] = {}
        self._was_ready = asyncio.Event()
        self._stopping = False
        self._restarts = 0
        self._since = time.monotonic()

    async def start(self) -> None:
        """Start the service and keep it running; returns at once."""
        self._log_file.write_bytes(b"")
        self._keep_task = asyncio.create_task(self._keep_running(), name=f"keep {self.name}")

    async def wait_ready(self) -> float:
        """Wait until the service is ready; returns the seconds of its first start.

        Raises:
            CliError: the process ended before it was ready; the message has the end of its log.
        """
        assert self._keep_task is not None, "start() comes first"
        ready = asyncio.ensure_future(self._was_ready.wait())
        await asyncio.wait({ready, self._keep_task}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if not self._was_ready.is_set():
            self._keep_task.result()
            raise CliError(f"{self.name} was stopped before it was ready")
        return time.monotonic() - self._since

    async def stop(self, grace_s: float) -> None:
        """Send SIGTERM, then SIGKILL to the process group after `grace_s` seconds; idempotent."""
        self._stopping = True
        if self._keep_task is None:
            return
        if self._process is not None and self._process.returncode is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), grace_s)
        self._kill_group()
        if self._process is not None:
            await self._process.wait()
        self._keep_task.cancel()
        await asyncio.wait({self._keep_task})

    def kill(self) -> None:
        """Send SIGKILL to the process group at once."""
        self._stopping = True
        self._kill_group()

    def status(self) -> ChildStatus:
        alive = self._process is not None and self._process.returncode is None
        state = "ready" if alive and self._ready else "starting" if alive else "restarting"
        return ChildStatus(
            name=self.name,
            state="stopped" if self._stopping else state,
            pid=self._process.pid if alive and self._process else None,
            address=self._ready.get("address", ""),
            metrics_address=self._ready.get("metrics_address", ""),
            restarts=self._restarts,
            uptime_s=time.monotonic() - self._since,
        )

    async def _keep_running(self) -> None:
        failures = 0
        while not self._stopping:
            code = await self._run_once()
            if self._stopping:
                return
            if not self._was_ready.is_set():
                raise CliError(f"{self.name} ended with status {code}:\n{self._log_tail()}")
            failures = 1 if time.monotonic() - self._since > GOOD_RUN_S else failures + 1
            delay = self._delay_s(failures)
            how = f"signal {-code}" if code < 0 else f"status {code}"
            self._on_event(f"{self.name} ended with {how}; starting it again {when_text(delay)}")
            await asyncio.sleep(delay)
            self._restarts += 1

    async def _run_once(self) -> int:
        self._ready = {}
        self._ready_file.unlink(missing_ok=True)
        self._since = time.monotonic()
        starting = asyncio.ensure_future(self._start_process())
        try:
            self._process = await asyncio.shield(starting)
        except asyncio.CancelledError:  # it may exist already
            self._process = await starting
            self._kill_group()
            await self._process.wait()
            raise
        watcher = asyncio.create_task(self._watch_ready(self._process.pid))
        try:
            return await self._process.wait()
        finally:
            watcher.cancel()
            self._kill_group()  # the processes that the service started

    async def _start_process(self) -> asyncio.subprocess.Process:
        with self._log_file.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *tied_to_parent(self._argv),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._cwd,
                start_new_session=True,
            )

    async def _watch_ready(self, pid: int) -> None:
        while not self._ready:
            with contextlib.suppress(OSError, ValueError):
                record = json.loads(self._ready_file.read_text())
                if record.get("pid") == pid:
                    self._ready = record
                    self._was_ready.set()
                    if self._restarts:
                        self._on_event(f"{self.name} is back")
                    return
            await asyncio.sleep(POLL_S)

    def _signal(self, signum: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signum)

    def _kill_group(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _log_tail(self) -> str:
        lines = self._log_file.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([*(f"    {line[:400]}" for line in lines), f"  (log: {self._log_file})"])
