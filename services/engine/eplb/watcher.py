"""Follows the group's map for one engine: checks it, hands it to the core, restores a lost one.

What the core made of it comes back with the rounds (`take`). Neither a map that does not fit nor an
etcd that is away changes what the engine uses.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing

from msgspec.structs import replace

from services.common.etcd.client import Changes, EtcdError, KeyValue, Listing, Lost
from services.engine.contract.messages import RoundReport
from services.engine.contract.runner import ExpertPlacement, ExpertShape
from services.engine.eplb.placement_map import (
    Applied,
    MapFormatError,
    PlacementMap,
    Rejection,
    decode,
    problem_with,
    version_in,
)
from services.engine.eplb.placement_store import MapTooLargeError, PlacementStore

log = logging.getLogger(__name__)
_RETRY_S = 1.0


class PlacementWatcher:
    """The engine's side of the map.

    Args:
        send: to the core; never blocks.
        changed: `applied` is another one now; returns at once.
    """

    def __init__(
        self,
        store: PlacementStore,
        *,
        engine_id: str,
        model_revision: str,
        shape: ExpertShape,
        send: Callable[[ExpertPlacement], None],
        changed: Callable[[], None],
    ) -> None:
        self._store = store
        self._model_revision = model_revision
        self._shape = shape
        self._send = send
        self._changed = changed
        self.applied = Applied(engine_id=engine_id, version=0)
        self._known: PlacementMap | None = None
        """The newest map of the group that could be read, whether it fits or not."""
        self._in_use: PlacementMap | None = None
        self._sent: dict[int, PlacementMap] = {}

    async def run(self) -> None:
        """For ever; ends by being cancelled."""
        while True:
            try:
                await self._follow()
            except (EtcdError, MapTooLargeError) as error:
                log.warning("the placement could not be restored: %s", error)
            await asyncio.sleep(_RETRY_S)

    def take(self, report: RoundReport) -> None:
        """What the core says of maps."""
        version, rejected = report.placement_version, report.placement_rejected
        if version != self.applied.version:
            log.info("placement %d is in use", version)
            self._in_use = self._sent.get(version, self._in_use)
            self._sent = {v: m for v, m in self._sent.items() if v > version}
            self._set(replace(self.applied, version=version))
        newest = 0 if self._known is None else self._known.version
        if rejected is not None and rejected.version >= newest:
            self._reject(rejected.version, rejected.reason)

    async def _follow(self) -> None:
        key = self._store.keys.map
        async with aclosing(self._store.etcd.watch_prefix(key)) as items:
            async for item in items:
                match item:
                    case Listing():
                        await self._look(item.items.get(key))
                    case Changes():
                        # A batch is whole transactions: only what stands at its end counts.
                        last = [change for change in item.changes if change.key == key][-1:]
                        for change in last:
                            await self._look(change.value)
                    case Lost():
                        log.warning("watch of the placement lost: %s", item.reason)

    async def _look(self, found: KeyValue | None) -> None:
        known = self._known
        if found is None:
            if known is not None:
                await self._restore(known, 0)
            return
        try:
            placement = decode(found.value, PlacementMap)
        except MapFormatError as error:
            self._reject(version_in(found.value), f"it cannot be read: {error}")
            return
        if known is None or placement.version > known.version:
            self._known = placement
            self._consider(placement)
        elif placement != known:
            await self._restore(_newer_of(placement, known), found.mod_revision)

    async def _restore(self, placement: PlacementMap, mod_revision: int) -> None:
        """etcd was emptied or set back; versions that engines have seen must not come again."""
        earlier = [] if self._in_use is None else [self._in_use]
        if await self._store.restore(placement, earlier, mod_revision):
            log.warning("etcd had lost the placement: version %d restored", placement.version)

    def _consider(self, placement: PlacementMap) -> None:
        problem = problem_with(placement, self._shape, self._model_revision)
        if problem is not None:
            self._reject(placement.version, problem)
            return
        log.info("placement %d by %s goes to the core", placement.version, placement.author)
        self._sent[placement.version] = placement
        self._set(replace(self.applied, rejected=None))
        self._send(placement.for_core())

    def _reject(self, version: int, reason: str) -> None:
        log.error(
            "placement %d refused, %d stays in use: %s", version, self.applied.version, reason
        )
        self._sent.pop(version, None)
        self._set(replace(self.applied, rejected=Rejection(version, reason)))

    def _set(self, applied: Applied) -> None:
        if applied != self.applied:
            self.applied = applied
            self._changed()


def _newer_of(stored: PlacementMap, known: PlacementMap) -> PlacementMap:
    """What should stand where etcd holds a version that engines have already passed.

    A map made later than the known one was written to an emptied store, by somebody who saw none:
    it keeps its content and gets the next version. One made before is from an older copy of the
    store, and yields.
    """
    if stored.created_unix_ms > known.created_unix_ms:
        return replace(stored, version=known.version + 1)
    return known
