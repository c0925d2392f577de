"""Reports how much of a model has been read, in log lines a few seconds apart."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping

log = logging.getLogger(__name__)

EVERY_S = 5.0
"""Least time between two lines; what takes less is not reported."""


class LoadProgress:
    """Counts bytes up to a total."""

    def __init__(
        self,
        what: str,
        total_bytes: int,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            what: begins each line, e.g. "reading tiny".
            now: a clock, in seconds.
        """
        self._what = what
        self._total = total_bytes
        self._now = now
        self._began = self._last = now()
        self._done = 0

    def add(self, nbytes: int) -> None:
        """Count bytes as read; logs if a line is due."""
        self._done += nbytes
        if not nbytes:
            return
        at = self._now()
        if at - self._last < EVERY_S:
            return
        self._last = at
        left_s = (at - self._began) * (self._total - self._done) / self._done
        log.info(
            "%s: %.0f of %.0f MiB, about %.0f s left",
            self._what,
            self._done / 2**20,
            self._total / 2**20,
            left_s,
        )

    def leave_out(self, nbytes: int) -> None:
        """Take bytes from the total: they will not be read."""
        self._total -= nbytes


class ReadTensors:
    """Counts the tensors of a model; each one once, since a later read is not part of the start."""

    def __init__(self, model: str, sizes: Mapping[str, int]) -> None:
        """
        Args:
            sizes: stored bytes of every tensor.
        """
        self._left = dict(sizes)
        self._progress = LoadProgress(f"reading {model}", sum(sizes.values()))

    def count(self, name: str) -> None:
        """Count a tensor as read."""
        self._progress.add(self._left.pop(name, 0))

    def skip(self, names: Iterable[str]) -> None:
        """Leave tensors out of the total: this process does not read them at the start."""
        self._progress.leave_out(sum(self._left.pop(name, 0) for name in names))
