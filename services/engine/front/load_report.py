"""The engine's load as others see it, and whether the core still makes progress."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable

from inferfleet_proto.internal.v1 import engine_pb2
from services.common.retry_after import retry_after_s
from services.engine.contract.messages import Load

_LEAST_INTERVAL_S = 0.02
_MOST_INTERVAL_S = 1.0
_ROUNDS_ALLOWED = 10
_OLD_NUMBERS_S = 1.0


class LoadBoard:
    """Holds the newest load; written by the front's pump, read by any number of watchers."""

    def __init__(
        self,
        engine_id: str,
        epoch_ms: int,
        *,
        stall_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.draining = False
        self.load = Load()
        self.placement_version = 0
        self.count_open: Callable[[], int] = lambda: 0
        """How many requests the core has been given and has not ended; set by the front."""
        self._engine_id = engine_id
        self.epoch_ms = epoch_ms
        self._stall_s = stall_s
        self._clock = clock
        self._sequence = 0
        self._busy_since: float | None = None
        self._longest_round_s = 0.0
        self._changed = asyncio.Condition()

    async def update(self, load: Load, *, num_open: int, placement_version: int = 0) -> None:
        """A round ended: take its load, the number of requests the core still holds, and the
        version of the map of experts it ran with."""
        now = self._clock()
        if self._busy_since is not None:
            self._longest_round_s = max(self._longest_round_s, now - self._busy_since)
        self._busy_since = now if num_open else None
        changed = (load, placement_version) != (self.load, self.placement_version)
        self.load, self.placement_version = load, placement_version
        if changed:
            await self.notify()

    def work_arrived(self) -> None:
        """The core was given a request; if it was idle, its progress is measured from now."""
        if self._busy_since is None:
            self._busy_since = self._clock()

    async def set_draining(self) -> None:
        """No new work is taken from now on."""
        self.draining = True
        await self.notify()

    async def notify(self) -> None:
        """Wake the watchers."""
        async with self._changed:
            self._sequence += 1
            self._changed.notify_all()

    @property
    def progress_age_s(self) -> float:
        """Seconds since the core last finished a round while it had work; 0 when idle."""
        return 0.0 if self._busy_since is None else self._clock() - self._busy_since

    @property
    def stalled(self) -> bool:
        """Whether that is longer than a long round explains."""
        return self.progress_age_s > max(self._stall_s, _ROUNDS_ALLOWED * self._longest_round_s)

    @property
    def retry_after_s(self) -> float:
        """When a refused request may come back, by the measured rate of the queue's end."""
        return retry_after_s(1, self.load.drain_requests_per_s, at_most_s=30.0)

    def report(self) -> engine_pb2.LoadReport:
        """The contract's message of this moment."""
        load, waiting = self.load, self.load.waiting_requests
        if self.progress_age_s > _OLD_NUMBERS_S:
            # The core's numbers are those of its last round; what came since waits.
            waiting = max(waiting, self.count_open() - load.running_requests)
        return engine_pb2.LoadReport(
            engine_id=self._engine_id,
            epoch_ms=self.epoch_ms,
            sequence=self._sequence,
            waiting_requests=waiting,
            running_requests=load.running_requests,
            uncached_tokens_queued=load.uncached_tokens_queued,
            held_blocks=load.held_blocks,
            total_blocks=load.total_blocks,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            decode_round_s=load.decode_round_s,
            last_progress_age_s=self.progress_age_s,
            draining=self.draining,
            placement_version=self.placement_version,
            drain_requests_per_s=load.drain_requests_per_s,
        )

    async def watch(self) -> AsyncGenerator[engine_pb2.LoadReport, None]:
        """A report at once, then at each change (at most 50 a second), at least one a second."""
        while True:
            seen = self._sequence
            yield self.report()
            await asyncio.sleep(_LEAST_INTERVAL_S)
            try:
                async with asyncio.timeout(_MOST_INTERVAL_S):
                    await self._wait_beyond(seen)
            except TimeoutError:
                continue

    async def _wait_beyond(self, sequence: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._sequence != sequence)
