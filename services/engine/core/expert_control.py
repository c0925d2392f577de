"""Brings a new placement of experts into use while rounds run, and asks for the experts' loads.

Everything runs on the device's thread between rounds: one expert's weights at a time, then the
exchange of maps. Nothing here waits: what has not ended is looked at when the next round is due.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future

from services.engine.contract.runner import ExpertPlacement, PlacementRefusedError
from services.engine.core.worker import Worker

LOADS_INTERVAL_S = 2.0

Loads = tuple[tuple[int, ...], ...]


class ExpertControl:
    """The wanted and the used placement of one engine. One thread calls everything."""

    def __init__(self, worker: Worker, now: Callable[[], float] = time.monotonic) -> None:
        self._worker = worker
        self._now = now
        self._wanted: ExpertPlacement | None = None
        self._step: tuple[ExpertPlacement, Future[bool]] | None = None
        self._exchange: tuple[int, Future[None]] | None = None
        self._rejected: tuple[int, str] | None = None
        self._loads: Future[Loads | None] | None = None
        self._loads_due = now() + LOADS_INTERVAL_S
        self.version = 0
        """Of the placement in use."""

    @property
    def pending(self) -> bool:
        """Whether `advance` has something to do now or later."""
        return bool(self._wanted or self._step or self._exchange)

    @property
    def news(self) -> bool:
        """Whether a refusal waits to be told."""
        return self._rejected is not None

    def want(self, placement: ExpertPlacement) -> None:
        """Bring this placement into use; one that was wanted before is given up."""
        self._wanted = placement

    def take_rejection(self) -> tuple[int, str] | None:
        """Version and reason of a placement that was refused; told once."""
        rejected, self._rejected = self._rejected, None
        return rejected

    def advance(self) -> None:
        """Take in what has ended and start what comes next; call when a round is due."""
        if self._exchange is not None and self._exchange[1].done():
            version, exchanged = self._exchange
            self._exchange = None
            exchanged.result()
            self.version = version
        if self._step is not None and self._step[1].done():
            self._end_step(*self._step)
        if self._wanted is not None and self._step is None and self._exchange is None:
            self._step = (self._wanted, self._worker.prepare_placement(self._wanted))

    def poll_loads(self) -> Loads | None:
        """The loads of a while ago, once every LOADS_INTERVAL_S while this is called."""
        if self._loads is None:
            if self._now() >= self._loads_due:
                self._loads_due = self._now() + LOADS_INTERVAL_S
                self._loads = self._worker.expert_loads()
            return None
        if not self._loads.done():
            return None
        loads, self._loads = self._loads.result(), None
        return loads

    def _end_step(self, placement: ExpertPlacement, step: "Future[bool]") -> None:
        self._step = None
        try:
            ready = step.result()
        except PlacementRefusedError as error:
            self._rejected = (placement.version, str(error))
            if self._wanted is placement:
                self._wanted = None
            return
        if ready and self._wanted is placement:
            self._wanted = None
            self._exchange = (placement.version, self._worker.apply_placement(placement.version))
