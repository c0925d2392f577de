"""The engine's load as the balancer sees it, and whether the core still makes progress."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable

from inferfleet_proto.internal.v1 import engine_pb2
from services.common.retry_after import retry_after_s
from services.engine.contract.messages import Load

_MIN_INTERVAL_S = 0.02
_MAX_INTERVAL_S = 1.0
_STALL_ROUNDS = 10
_STALE_LOAD_S = 1.0
_MAX_RETRY_AFTER_S = 30.0


class LoadState:
    """The newest load of the engine. `OpenRequests` writes it, any number of watchers read it.

    Args:
        count_open: number of requests that were sent to the core and have not ended.
        stall_s: the core counts as stalled after this long without a round, or after 10 times its
            longest round if that is longer.
    """

    def __init__(
        self,
        engine_id: str,
        epoch_ms: int,
        *,
        stall_s: float,
        count_open: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.epoch_ms = epoch_ms
        self._engine_id = engine_id
        self._stall_s = stall_s
        self._count_open = count_open
        self._clock = clock
        self._load = Load()
        self._placement_version = 0
        self._draining = False
        self._sequence = 0
        self._busy_since: float | None = None
        self._longest_round_s = 0.0
        self._changed = asyncio.Condition()

    @property
    def draining(self) -> bool:
        """Whether the engine refuses new requests."""
        return self._draining

    @property
    def placement_version(self) -> int:
        """Version of the expert placement that the last round ran with."""
        return self._placement_version

    async def record_round(self, load: Load, *, placement_version: int = 0) -> None:
        """Store the load after a round; wakes the watchers if something changed."""
        now = self._clock()
        if self._busy_since is not None:
            self._longest_round_s = max(self._longest_round_s, now - self._busy_since)
        self._busy_since = now if self._count_open() else None
        changed = (load, placement_version) != (self._load, self._placement_version)
        self._load, self._placement_version = load, placement_version
        if changed:
            await self._notify()

    def record_request(self) -> None:
        """A request was sent to the core; if the core was idle, progress is measured from now."""
        if self._busy_since is None:
            self._busy_since = self._clock()

    async def set_draining(self) -> None:
        """Report that the engine refuses new requests from now on."""
        self._draining = True
        await self._notify()

    @property
    def progress_age_s(self) -> float:
        """Seconds since the core last finished a round while it had work; 0 when idle."""
        return 0.0 if self._busy_since is None else self._clock() - self._busy_since

    @property
    def stalled(self) -> bool:
        """Whether the core has gone without a round for longer than a long round takes."""
        return self.progress_age_s > max(self._stall_s, _STALL_ROUNDS * self._longest_round_s)

    @property
    def retry_after_s(self) -> float:
        """Seconds after which a refused request should be repeated: until one request ends."""
        return retry_after_s(1, self._load.drain_requests_per_s, at_most_s=_MAX_RETRY_AFTER_S)

    def report(self) -> engine_pb2.LoadReport:
        """The load at this moment as a message of the Engine service."""
        load, waiting = self._load, self._load.waiting_requests
        if self.progress_age_s > _STALE_LOAD_S:
            # The load is that of the last round; requests that arrived since then are waiting.
            waiting = max(waiting, self._count_open() - load.running_requests)
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
            draining=self._draining,
            placement_version=self._placement_version,
            drain_requests_per_s=load.drain_requests_per_s,
        )

    async def watch(self) -> AsyncGenerator[engine_pb2.LoadReport, None]:
        """Yield a report at once, then after each change: at most 50 and at least 1 per second."""
        while True:
            seen = self._sequence
            yield self.report()
            await asyncio.sleep(_MIN_INTERVAL_S)
            try:
                async with asyncio.timeout(_MAX_INTERVAL_S):
                    await self._wait_change(seen)
            except TimeoutError:
                continue

    async def _notify(self) -> None:
        async with self._changed:
            self._sequence += 1
            self._changed.notify_all()

    async def _wait_change(self, sequence: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._sequence != sequence)
