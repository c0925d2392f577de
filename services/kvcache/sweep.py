"""Removes from Redis what no engine owns any more, a few hundred entries at a time.

A clear is one write; this is the rest of its work. It also renews the entries that are owned, keeps
the index below its cap, and corrects the count of entries for what Redis evicted by itself.
"""

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass

from services.kvcache.link import StoreAwayError
from services.kvcache.metrics import Metrics
from services.kvcache.store import Store

log = logging.getLogger(__name__)

BATCH = 500
# Redis gets at least this many times a batch's own time for others before the next batch.
_REST = 4.0
# A full index is brought down to this part of its cap.
_AFTER_CAP = 0.95


@dataclass(frozen=True)
class Swept:
    """One pass over the index."""

    seen: int
    deleted: int
    given_up: int


class Sweeper:
    """Sweeps when told that something went, and from time to time anyway."""

    def __init__(
        self,
        store: Store,
        metrics: Metrics,
        *,
        entry_ttl_s: int,
        max_entries: int,
        interval_s: float,
        spacing_s: float = 5.0,
    ) -> None:
        self._store = store
        self._metrics = metrics
        self._entry_ttl_s = entry_ttl_s
        self._max_entries = max_entries
        self._interval_s = interval_s
        self._spacing_s = spacing_s
        self._wanted = asyncio.Event()

    def want(self) -> None:
        """Something was dropped: sweep soon. Returns at once."""
        self._wanted.set()

    async def run(self) -> None:
        """Sweep for ever; the caller cancels it."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._wanted.wait()
            self._wanted.clear()
            try:
                swept = await self.sweep()
                log.debug("%s", swept)
            except StoreAwayError:
                self._wanted.set()
            await asyncio.sleep(self._spacing_s)

    async def sweep(self) -> Swept:
        """One pass over all entries.

        Raises:
            StoreAwayError: the pass is incomplete; begin again later.
        """
        at_start = await self._store.num_entries()
        keep = self._max_entries
        share = 1 - keep * _AFTER_CAP / at_start if at_start >= keep else 0.0
        seen = deleted = given_up = cursor = 0
        while True:
            began = time.monotonic()
            cursor, keys = await self._store.scan(cursor, BATCH)
            for start in range(0, len(keys), BATCH):
                part = keys[start : start + BATCH]
                surplus = round(len(part) * share)
                gone, alive = await self._store.script("sweep", (self._entry_ttl_s, surplus, *part))
                seen, deleted, given_up = seen + len(part), deleted + gone, given_up + alive
            if cursor == 0:
                break
            await asyncio.sleep((time.monotonic() - began) * _REST)
        await self._correct(at_start, seen, deleted)
        self._metrics.swept.inc(deleted)
        self._metrics.given_up.inc(given_up)
        return Swept(seen, deleted, given_up)

    async def _correct(self, at_start: int, seen: int, deleted: int) -> None:
        """Entries that Redis evicted or expired were never counted down."""
        at_end = await self._store.num_entries()
        written_meanwhile = max(at_end - at_start + deleted, 0)
        truth = max(seen - deleted, 0) + written_meanwhile
        if abs(truth - at_end) > max(truth, at_end) * 0.01:
            await self._store.adjust_entries(truth - at_end)
