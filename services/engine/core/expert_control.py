"""`ExpertControl`: loads a new placement of experts while rounds run, and collects expert loads.

The work runs on the device's thread between rounds: the weights of one expert at a time, then the
switch to the new map. Nothing here waits: `advance` looks at what has ended since the last call.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from services.engine.contract.messages import PlacementRejection
from services.engine.contract.runner import ExpertPlacement, PlacementRefusedError
from services.engine.core.worker import Worker

LOADS_INTERVAL_S = 2.0

Loads = tuple[tuple[int, ...], ...]
"""[layers with experts, logical experts] tokens."""


class PlacementNews(NamedTuple):
    """The placement's part of a report."""

    version: int
    """Of the placement in use."""
    rejected: PlacementRejection | None
    """Returned once."""
    loads: Loads | None
    """Returned every LOADS_INTERVAL_S while rounds run, once after the last of them, else None."""


class ExpertControl:
    """The wanted placement and the one in use. One thread calls all methods."""

    def __init__(self, worker: Worker, now: Callable[[], float] = time.monotonic) -> None:
        """Args:
        now: monotonic seconds.
        """
        self._worker = worker
        self._now = now
        self._has_experts = worker.describe().experts is not None
        self._wanted: ExpertPlacement | None = None
        self._step: tuple[ExpertPlacement, Future[bool]] | None = None
        self._exchange: tuple[int, Future[None]] | None = None
        self._rejected: PlacementRejection | None = None
        self._loads: Future[Loads | None] | None = None
        self._loads_due = now() + LOADS_INTERVAL_S
        self._counts_owed = False
        self._version = 0
        self._reported_version = 0

    @property
    def version(self) -> int:
        """Version of the placement in use; 0 is the initial one."""
        return self._version

    @property
    def pending(self) -> bool:
        """Whether a placement is being loaded."""
        return bool(self._wanted or self._step or self._exchange)

    @property
    def has_news(self) -> bool:
        """Whether a rejection, a new version or the last rounds' counts can be reported now."""
        changed = self._rejected is not None or self._version != self._reported_version
        return changed or self._loads_ready

    @property
    def owes_loads(self) -> bool:
        """Whether rounds have counted tokens that no report had yet."""
        return self._counts_owed or self._loads is not None

    def want(self, placement: ExpertPlacement) -> None:
        """Load this placement and use it; replaces one that is still being loaded."""
        self._wanted = placement

    def take_news(self) -> PlacementNews:
        """The state to report; counts as reported."""
        rejected, self._rejected = self._rejected, None
        self._reported_version = self._version
        loads = self.poll_loads() if self._has_experts else None
        return PlacementNews(self._version, rejected, loads)

    def advance_round(self) -> None:
        """Do the same as `advance`, before a round: it will count tokens."""
        self._counts_owed = self._has_experts
        self.advance()

    def advance(self) -> None:
        """Handle what has ended and start the next piece of work."""
        if self._exchange is not None and self._exchange[1].done():
            version, exchanged = self._exchange
            self._exchange = None
            exchanged.result()
            self._version = version
        if self._step is not None and self._step[1].done():
            self._end_step(*self._step)
        if self._wanted is not None and self._step is None and self._exchange is None:
            self._step = (self._wanted, self._worker.prepare_placement(self._wanted))

    def poll_loads(self) -> Loads | None:
        """The loads, once every LOADS_INTERVAL_S; the calls in between return None."""
        if self._loads is None:
            if self._now() >= self._loads_due:
                self._loads_due = self._now() + LOADS_INTERVAL_S
                self._counts_owed = False
                self._loads = self._worker.expert_loads()
            return None
        if not self._loads.done():
            return None
        loads, self._loads = self._loads.result(), None
        return loads

    @property
    def _loads_ready(self) -> bool:
        """Whether the next report can request loads that are owed, or carry them."""
        if self._loads is not None:
            return self._loads.done()
        return self._counts_owed and self._now() >= self._loads_due

    def _end_step(self, placement: ExpertPlacement, step: "Future[bool]") -> None:
        self._step = None
        try:
            ready = step.result()
        except PlacementRefusedError as error:
            self._rejected = PlacementRejection(placement.version, str(error))
            if self._wanted is placement:
                self._wanted = None
            return
        if ready and self._wanted is placement:
            self._wanted = None
            self._exchange = (placement.version, self._worker.apply_placement(placement.version))
