"""Processes of the other ranks: rank 0's handles to them, and what each of them runs."""

import argparse
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from services.common.service import telemetry
from services.common.service.child_process import die_with_parent
from services.engine.compute.ranks.answers import Answer, Joined, Loaded, LoadFailed
from services.engine.compute.ranks.channel import Channel, ChannelClosedError
from services.engine.contract.model_config import ModelFileError
from services.engine.contract.runner import RunnerFailedError

log = logging.getLogger(__name__)

END_S = 3.0
"""Time for a rank's process to end before it is killed."""
_CAUSE_S = END_S / 3
"""Time to wait for the end of a process whose connection was lost."""
_POLL_S = 0.01


class RankProcess:
    """One other rank. Its process ends when this end of the channel is closed."""

    def __init__(self, name: str, module: str, join: msgspec.Struct) -> None:
        """Start the process and send its first command.

        Args:
            name: the rank's name in errors, e.g. "expert rank 1".
            module: the process's main module.
            join: the first command.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, "--fd", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._name = name
        self._channel: Channel[Answer] = Channel(ours, Answer)
        self.send(join)

    def wait_loaded(self) -> int:
        """Wait until the rank has loaded its weights; returns their size in bytes.

        Raises:
            ModelFileError: the rank cannot read the model.
            RunnerFailedError: the process ended.
        """
        answer = self._answer()
        if isinstance(answer, LoadFailed):
            raise ModelFileError(f"{self._name}: {answer.message}")
        assert isinstance(answer, Loaded), answer
        return answer.weights_bytes

    def wait_joined(self) -> None:
        """Wait until the rank has connected to all others.

        Raises:
            RunnerFailedError: the process ended.
        """
        answer = self._answer()
        assert isinstance(answer, Joined), answer

    def send(self, command: msgspec.Struct) -> None:
        """Send a command.

        Raises:
            RunnerFailedError: the process ended.
        """
        try:
            self._channel.send(command)
        except ChannelClosedError:
            raise self._failure() from None

    def check(self) -> None:
        """Check that the process runs.

        Raises:
            RunnerFailedError: it ended.
        """
        if self._process.poll() is not None:
            raise self._failure()

    def close(self) -> None:
        """End the process; kill it if it does not end within END_S. Idempotent."""
        self._channel.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> Answer:
        try:
            return self._channel.next()
        except ChannelClosedError:
            raise self._failure() from None

    def _failure(self) -> RunnerFailedError:
        try:
            status = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            return RunnerFailedError(f"{self._name} closed its channel, but still runs")
        if status < 0:
            how = signal.Signals(-status).name
            return RunnerFailedError(f"{self._name} was killed by {how}")
        return RunnerFailedError(f"{self._name} ended with status {status}")


class OtherRanks:
    """All other ranks of an engine, as rank 0 sees them."""

    def __init__(self) -> None:
        self._ranks: list[RankProcess] = []

    def start(self, name: str, module: str, join: msgspec.Struct) -> None:
        """Start one more rank; see RankProcess."""
        self._ranks.append(RankProcess(name, module, join))

    def __len__(self) -> int:
        return len(self._ranks)

    def wait_loaded(self) -> int:
        """Wait until all ranks have loaded; returns the bytes of all their weights.

        Raises:
            ModelFileError: a rank cannot read the model.
            RunnerFailedError: a process ended.
        """
        return sum(rank.wait_loaded() for rank in self._ranks)

    def wait_joined(self) -> None:
        """Wait until every rank has connected to all others.

        Raises:
            RunnerFailedError: a process ended.
        """
        for rank in self._ranks:
            rank.wait_joined()

    def send(self, command: msgspec.Struct) -> None:
        """Send a command to every rank.

        Raises:
            RunnerFailedError: a process ended.
        """
        for rank in self._ranks:
            rank.send(command)

    def check(self) -> None:
        """Check that all processes run.

        Raises:
            RunnerFailedError: one ended; the message says which and how.
        """
        for rank in self._ranks:
            rank.check()

    @contextlib.contextmanager
    def naming_cause(self) -> Iterator[None]:
        """Replace a lost connection in the body by the end of the process behind it.

        Raises:
            RunnerFailedError: of the ended process, if one ends within a second; else the body's.
        """
        try:
            yield
        except RunnerFailedError:
            limit = time.monotonic() + _CAUSE_S
            while time.monotonic() < limit:
                self.check()
                time.sleep(_POLL_S)
            raise

    def close(self) -> None:
        """End all processes; idempotent."""
        for rank in self._ranks:
            rank.close()
        self._ranks = []


def run_rank(description: str, commands: Any, serve: Callable[[Channel[Any]], None]) -> None:
    """Run a rank's process: serve the commands on an inherited socket, then exit.

    It never returns: it exits at once, so that no thread can delay the exit. Any error ends the
    process. Rank 0 notices, and the engine ends as a whole.

    Args:
        description: of the process, for `--help`.
        commands: union of the commands that rank 0 sends.
        serve: called with the channel to rank 0; ends with ChannelClosedError when rank 0 ends.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--fd", type=int, required=True, help="the inherited socket to rank 0")
    args = parser.parse_args()
    die_with_parent()
    # A terminal or a supervisor signals the whole process group, but rank 0 ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    telemetry.setup("engine", otlp_endpoint="", log_level="info")
    telemetry.log_stray_output()
    status = 0
    try:
        with contextlib.suppress(ChannelClosedError):
            serve(Channel(socket.socket(fileno=args.fd), commands))
    except Exception:  # the process's edge: rank 0 learns of the error from the exit
        log.exception("the rank failed")
        status = 1
    sys.stderr.flush()
    os._exit(status)
