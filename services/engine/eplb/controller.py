"""The controller of a placement group: sums the loads, plans a map and writes it if it is better.

Every engine of the group runs one; the elected leader's writes.
"""

import asyncio
import logging

from services.common.etcd.client import EtcdError
from services.common.etcd.election import Election, Leadership
from services.engine.contract.runner import ExpertShape
from services.engine.eplb.placement_map import PlacementMap, problem_with
from services.engine.eplb.placement_store import (
    GroupState,
    MapTooLargeError,
    PlacementStore,
    now_ms,
)
from services.engine.eplb.planning import (
    PlanSettings,
    draft_map,
    make_plan,
    reason_to_keep,
    slots_in_use,
    sum_loads,
)

log = logging.getLogger(__name__)


class PlacementController:
    """One candidate for the leader of a placement group.

    Args:
        shape: shape of this engine; the loads of engines of another shape are not counted.
        interval_s: seconds between two attempts to improve the map.
    """

    def __init__(
        self,
        store: PlacementStore,
        *,
        engine_id: str,
        model: str,
        model_revision: str,
        shape: ExpertShape,
        settings: PlanSettings,
        interval_s: float,
    ) -> None:
        self._store = store
        self._engine_id = engine_id
        self._model = model
        self._model_revision = model_revision
        self._shape = shape
        self._settings = settings
        self._interval_s = interval_s
        self.election = Election(store.etcd, store.keys.leader, engine_id.encode())

    async def start(self) -> None:
        """Begin to campaign; returns at once, also if etcd is unavailable."""
        await self.election.start()

    async def run(self) -> None:
        """Improve the map at each interval while this candidate leads; runs until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            term = self.election.leadership
            if term is None:
                continue
            try:
                await self.improve_map(term)
            except (EtcdError, MapTooLargeError) as error:
                log.warning("no new placement written: %s", error)

    async def close(self) -> None:
        """Resign; idempotent."""
        await self.election.stop()

    async def improve_map(self, term: Leadership) -> PlacementMap | None:
        """Plan once and write the new map if it is better; returns the map that was written.

        Raises:
            EtcdError: etcd is unavailable; the next call reads everything again.
            MapTooLargeError: the map is too large for etcd.
        """
        state = await self._store.read()
        proposed = await asyncio.to_thread(self._propose, state)
        if proposed is None:
            return None
        written = await self._store.write(proposed, state, fence=term.fence)
        if written is None:
            log.warning(
                "placement not written: another map was written first, or another engine leads"
            )
        else:
            log.info(
                "placement %d written: balance %.3f, was %.3f",
                written.version,
                written.balance_after or 0.0,
                written.balance_before or 0.0,
            )
        return written

    def _propose(self, state: GroupState) -> PlacementMap | None:
        """Plan on a thread: for a large model this takes most of a second."""
        shape, revision = self._shape, self._model_revision
        records = [record for record in state.loads.values() if record.shape == shape]
        load = sum_loads(records, shape, revision)
        old = slots_in_use(state.newest, shape, revision)
        plan = make_plan(load, old, shape, self._settings)
        reason = reason_to_keep(plan, state)
        if reason is not None:
            log.debug("the placement stays: %s", reason)
            return None
        proposed = draft_map(
            plan,
            shape,
            model=self._model,
            model_revision=revision,
            window_rounds=max((record.window_rounds for record in records), default=0),
            author=f"controller {self._engine_id}",
            created_unix_ms=now_ms(),
        )
        problem = problem_with(proposed, shape, revision, draft=True)
        if problem is not None:
            raise AssertionError(f"the policy made a map that does not fit: {problem}")
        return proposed
