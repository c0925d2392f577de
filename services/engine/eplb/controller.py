"""The leader's loop of a group: sums loads, plans off the event loop, writes what pays."""

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
    draft,
    make_plan,
    slots_in_use,
    sum_loads,
    why_not,
)

log = logging.getLogger(__name__)


class PlacementController:
    """A candidate; every engine of a group runs one, and one of them leads.

    Args:
        shape: of this engine; engines of another shape are not planned for.
        interval_s: between two looks at the loads.
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

    async def run(self) -> None:
        """For ever; resigns when cancelled."""
        await self.election.start()
        try:
            while True:
                await asyncio.sleep(self._interval_s)
                term = self.election.leadership
                if term is not None:
                    await self._guarded_turn(term)
        finally:
            await self.election.stop()

    async def turn(self, term: Leadership) -> PlacementMap | None:
        """Look once; what was written, if anything was.

        Raises:
            EtcdError: etcd is away; the next turn reads anew.
            MapTooLargeError: etcd cannot hold this model's map.
        """
        state = await self._store.read()
        proposed = await asyncio.to_thread(self._propose, state)
        if proposed is None:
            return None
        written = await self._store.write(proposed, state, fence=term.fence)
        if written is None:
            log.warning("placement not written: another map came first, or the term is over")
        else:
            log.info(
                "placement %d written: balance %.3f, was %.3f",
                written.version,
                written.balance_after or 0.0,
                written.balance_before or 0.0,
            )
        return written

    async def _guarded_turn(self, term: Leadership) -> None:
        try:
            await self.turn(term)
        except (EtcdError, MapTooLargeError) as error:
            log.warning("no new placement: %s", error)

    def _propose(self, state: GroupState) -> PlacementMap | None:
        """Runs in a thread: planning for a large model takes a good part of a second."""
        shape, revision = self._shape, self._model_revision
        records = [record for record in state.loads.values() if record.shape == shape]
        load = sum_loads(records, shape, revision)
        old = slots_in_use(state.newest, shape, revision)
        plan = make_plan(load, old, shape, self._settings)
        reason = why_not(plan, state)
        if reason is not None:
            log.debug("no new placement: %s", reason)
            return None
        proposed = draft(
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
