"""Removes entries that no engine owns any more from Redis, a few hundred at a time.

Dropping all blocks of an engine is one write; sweeps do the rest of that work. They also renew the
entries that have an owner, keep the index below its cap, and correct the count of entries for those
that Redis evicted.
"""

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass

from services.kvcache.index import PrefixIndex
from services.kvcache.metrics import KvCacheMetrics
from services.kvcache.redis_connection import RedisUnavailableError

log = logging.getLogger(__name__)

BATCH = 500
_PAUSE_FACTOR = 4.0
"""Pause after each batch as a multiple of its duration, so that Redis can serve others."""
_FILL_AFTER_CAP = 0.95
"""A full index is reduced to this part of its cap."""


@dataclass(frozen=True)
class Swept:
    """The result of one pass over the index."""

    seen: int
    deleted: int
    given_up: int
    """Of the deleted entries, those that had an owner."""


class Sweeper:
    """Sweeps on request, and at least every `interval_s` seconds.

    Args:
        spacing_s: shortest time between two sweeps.
    """

    def __init__(
        self,
        index: PrefixIndex,
        metrics: KvCacheMetrics,
        *,
        interval_s: float,
        spacing_s: float = 5.0,
    ) -> None:
        self._index = index
        self._metrics = metrics
        self._interval_s = interval_s
        self._spacing_s = spacing_s
        self._requested = asyncio.Event()

    def request(self) -> None:
        """Sweep soon; returns at once."""
        self._requested.set()

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._requested.wait()
            self._requested.clear()
            try:
                swept = await self.sweep()
                log.debug("%s", swept)
            except RedisUnavailableError:
                self._requested.set()
            await asyncio.sleep(self._spacing_s)

    async def sweep(self) -> Swept:
        """Make one pass over all entries.

        Raises:
            RedisUnavailableError: the pass is incomplete; it has to be repeated.
        """
        at_start = await self._index.num_entries()
        share = self._surplus_share(at_start)
        seen = deleted = given_up = cursor = 0
        while True:
            began = time.monotonic()
            cursor, keys = await self._index.scan(cursor, BATCH)
            for start in range(0, len(keys), BATCH):
                part = keys[start : start + BATCH]
                gone, owned = await self._index.sweep_entries(part, round(len(part) * share))
                seen, deleted, given_up = seen + len(part), deleted + gone, given_up + owned
            if cursor == 0:
                break
            await asyncio.sleep((time.monotonic() - began) * _PAUSE_FACTOR)
        await self._correct_count(at_start, seen, deleted)
        self._metrics.swept.inc(deleted)
        self._metrics.given_up.inc(given_up)
        return Swept(seen, deleted, given_up)

    def _surplus_share(self, num_entries: int) -> float:
        """The part of the entries to delete although they have owners."""
        cap = self._index.max_entries
        return 1 - cap * _FILL_AFTER_CAP / num_entries if num_entries >= cap else 0.0

    async def _correct_count(self, at_start: int, seen: int, deleted: int) -> None:
        """Correct the count of entries, which evictions and expiries do not lower."""
        at_end = await self._index.num_entries()
        written_meanwhile = max(at_end - at_start + deleted, 0)
        actual = max(seen - deleted, 0) + written_meanwhile
        if abs(actual - at_end) > max(actual, at_end) * 0.01:
            await self._index.adjust_entries(actual - at_end)
