"""Another rank's process as rank 0 sees it, and what such a process does around its work."""

import argparse
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
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


class RankProcess:
    """One other rank; ends when this end of the line is closed."""

    def __init__(self, name: str, module: str, join: msgspec.Struct) -> None:
        """Start it and send its first command.

        Args:
            name: what errors call it, e.g. "expert rank 1".
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

    def loaded(self) -> int:
        """Wait for its weights; gives their bytes.

        Raises:
            ModelFileError: it cannot read the model.
            RunnerFailedError: it is gone.
        """
        answer = self._answer()
        if isinstance(answer, LoadFailed):
            raise ModelFileError(f"{self._name}: {answer.message}")
        assert isinstance(answer, Loaded), answer
        return answer.weights_bytes

    def joined(self) -> None:
        """Wait until it has met all others."""
        answer = self._answer()
        assert isinstance(answer, Joined), answer

    def send(self, command: msgspec.Struct) -> None:
        """Tell it what to do next.

        Raises:
            RunnerFailedError: it is gone.
        """
        try:
            self._channel.send(command)
        except ChannelClosedError:
            raise self._gone() from None

    def check(self) -> None:
        """Raise RunnerFailedError if it is gone."""
        if self._process.poll() is not None:
            raise self._gone()

    def close(self) -> None:
        """End it, by force if need be; idempotent."""
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
            raise self._gone() from None

    def _gone(self) -> RunnerFailedError:
        try:
            status = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            return RunnerFailedError(f"{self._name} does not answer")
        if status < 0:
            how = signal.Signals(-status).name
            return RunnerFailedError(f"{self._name} was killed by {how}")
        return RunnerFailedError(f"{self._name} ended with status {status}")


def run_rank(description: str, commands: Any, serve: Callable[[Channel[Any]], None]) -> None:
    """Serve on an inherited socket; never returns, so that no thread can hold the exit up.

    Whatever goes wrong ends the process: rank 0 sees it, and the engine ends as a whole.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--fd", type=int, required=True, help="the inherited socket to rank 0")
    args = parser.parse_args()
    die_with_parent()
    # A terminal or a supervisor signals the whole group; it is rank 0 that ends us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    telemetry.setup("engine", otlp_endpoint="", log_level="info")
    status = 0
    try:
        with contextlib.suppress(ChannelClosedError):
            serve(Channel(socket.socket(fileno=args.fd), commands))
    except Exception:  # the edge: the others learn of it by this process's end
        log.exception("the rank cannot go on")
        status = 1
    sys.stderr.flush()
    os._exit(status)
