"""Follows the placement map of the group for one engine.

It checks a new map, sends it to the core and restores a map that etcd has lost. The core's reports
say whether a map is in use (`handle_report`). A map that does not fit, or an etcd that is
unavailable, changes nothing.
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
    """Keeps one engine on the newest map of its group.

    Args:
        send: sends a placement to the core; never blocks.
        on_applied: called when `applied` has changed; must return at once.
    """

    def __init__(
        self,
        store: PlacementStore,
        *,
        engine_id: str,
        model_revision: str,
        shape: ExpertShape,
        send: Callable[[ExpertPlacement], None],
        on_applied: Callable[[], None],
    ) -> None:
        self._store = store
        self._model_revision = model_revision
        self._shape = shape
        self._send = send
        self._on_applied = on_applied
        self.applied = Applied(engine_id=engine_id, version=0)
        """The version in use and the last rejection, as this engine publishes them."""
        self._newest: PlacementMap | None = None
        """The newest map of the group that could be read, whether it fits or not."""
        self._in_use: PlacementMap | None = None
        self._sent: dict[int, PlacementMap] = {}

    async def run(self) -> None:
        """Follow the map until cancelled."""
        while True:
            try:
                await self._watch_map()
            except (EtcdError, MapTooLargeError) as error:
                log.warning("the placement map could not be restored: %s", error)
            await asyncio.sleep(_RETRY_S)

    def handle_report(self, report: RoundReport) -> None:
        """Take the placement version in use, or a rejection, from a report of the core."""
        version, rejected = report.placement_version, report.placement_rejected
        if version != self.applied.version:
            log.info("placement %d is in use", version)
            self._in_use = self._sent.get(version, self._in_use)
            self._sent = {v: m for v, m in self._sent.items() if v > version}
            self._set_applied(replace(self.applied, version=version))
        newest = 0 if self._newest is None else self._newest.version
        if rejected is not None and rejected.version >= newest:
            self._reject(rejected.version, rejected.reason)

    async def _watch_map(self) -> None:
        key = self._store.keys.map
        async with aclosing(self._store.etcd.watch_prefix(key)) as items:
            async for item in items:
                match item:
                    case Listing():
                        await self._handle_value(item.items.get(key))
                    case Changes():
                        changes = [change for change in item.changes if change.key == key]
                        if changes:  # whole transactions: only the last value counts
                            await self._handle_value(changes[-1].value)
                    case Lost():
                        log.warning("watch of the placement map lost: %s", item.reason)

    async def _handle_value(self, found: KeyValue | None) -> None:
        newest = self._newest
        if found is None:
            if newest is not None:
                await self._restore(newest, 0)
            return
        try:
            placement = decode(found.value, PlacementMap)
        except MapFormatError as error:
            self._reject(version_in(found.value), f"the map cannot be read: {error}")
            return
        if newest is None or placement.version > newest.version:
            self._newest = placement
            self._send_to_core(placement)
        elif placement != newest:
            await self._restore(_map_to_restore(placement, newest), found.mod_revision)

    async def _restore(self, placement: PlacementMap, mod_revision: int) -> None:
        """Write a map that etcd has lost: a version that engines have seen is never used again."""
        earlier = [] if self._in_use is None else [self._in_use]
        if await self._store.restore(placement, earlier, mod_revision):
            log.warning("etcd had lost the placement map: restored version %d", placement.version)

    def _send_to_core(self, placement: PlacementMap) -> None:
        problem = problem_with(placement, self._shape, self._model_revision)
        if problem is not None:
            self._reject(placement.version, problem)
            return
        log.info("placement %d by %s sent to the core", placement.version, placement.author)
        self._sent[placement.version] = placement
        self._set_applied(replace(self.applied, rejected=None))
        self._send(placement.for_core())

    def _reject(self, version: int, reason: str) -> None:
        log.error(
            "placement %d rejected, %d stays in use: %s", version, self.applied.version, reason
        )
        self._sent.pop(version, None)
        self._set_applied(replace(self.applied, rejected=Rejection(version, reason)))

    def _set_applied(self, applied: Applied) -> None:
        if applied != self.applied:
            self.applied = applied
            self._on_applied()


def _map_to_restore(stored: PlacementMap, newest: PlacementMap) -> PlacementMap:
    """The map to write where etcd holds a version that engines have already passed.

    A stored map that was made later than the newest one was written to an emptied store, by an
    author who saw no map: it keeps its content and gets the next version. A stored map that was
    made earlier is from an older copy of the store and is replaced.
    """
    if stored.created_unix_ms > newest.created_unix_ms:
        return replace(stored, version=newest.version + 1)
    return newest
