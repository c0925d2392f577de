"""An engine's part in the placement of its group: watches, reports, and stands for controller."""

import asyncio
import logging
from collections.abc import Callable

import numpy as np

from services.common.config.settings import ConfigError
from services.common.etcd.config import connect
from services.common.etcd.registry import Registration
from services.engine.contract.messages import CoreReady, RoundReport
from services.engine.contract.runner import ExpertPlacement, ExpertShape
from services.engine.eplb.controller import PlacementController
from services.engine.eplb.placement_map import EngineLoads, Table, encode
from services.engine.eplb.placement_store import PlacementStore, group_of
from services.engine.eplb.planning import PlanSettings, make_plan, slots_in_use
from services.engine.eplb.policy import PlacementShapeError
from services.engine.eplb.watcher import PlacementWatcher
from services.engine.front.config import FrontConfig

log = logging.getLogger(__name__)
_LOADS_TTL_S = 15


class PlacementMember:
    """Everything an engine with experts does about its placement; owns its connection to etcd.

    Raises:
        ConfigError: the model's slots, ranks and groups cannot be planned as configured.
    """

    def __init__(
        self,
        config: FrontConfig,
        ready: CoreReady,
        shape: ExpertShape,
        engine_id: str,
        send: Callable[[ExpertPlacement], None],
    ) -> None:
        self._config = config
        self._ready = ready
        self._shape = shape
        self._engine_id = engine_id
        self._load: Table = ((0,) * shape.num_experts,) * shape.num_layers
        self._etcd = connect(config)
        store = PlacementStore(self._etcd, group_of(ready.model, ready.model_revision))
        self._applied_key = Registration(
            self._etcd, store.keys.applied(engine_id), lambda: encode(self._watcher.applied)
        )
        self._loads_key = Registration(
            self._etcd, store.keys.loads(engine_id), self._loads, _LOADS_TTL_S
        )
        self._watcher = PlacementWatcher(
            store,
            engine_id=engine_id,
            model_revision=ready.model_revision,
            shape=shape,
            send=send,
            changed=self._applied_key.refresh_soon,
        )
        self._controller = self._make_controller(store) if config.placement_interval_s else None

    def take(self, report: RoundReport) -> None:
        """A round's news; returns at once."""
        self._watcher.take(report)
        if report.expert_loads is not None:
            self._load = tuple(tuple(row) for row in report.expert_loads)
            self._loads_key.refresh_soon()

    async def run(self) -> None:
        """For ever; when cancelled, takes the engine's keys out and resigns."""
        await self._applied_key.start()
        await self._loads_key.start()
        try:
            async with asyncio.TaskGroup() as parts:
                parts.create_task(self._watcher.run())
                if self._controller is not None:
                    parts.create_task(self._controller.run())
        finally:
            await asyncio.gather(self._applied_key.stop(), self._loads_key.stop())
            await self._etcd.close()

    def _loads(self) -> bytes:
        return encode(
            EngineLoads(
                engine_id=self._engine_id,
                model=self._ready.model,
                model_revision=self._ready.model_revision,
                num_layers=self._shape.num_layers,
                num_experts=self._shape.num_experts,
                num_slots=self._shape.num_slots,
                num_ranks=self._shape.num_ranks,
                window_rounds=self._config.expert_load_window,
                load=self._load,
            )
        )

    def _make_controller(self, store: PlacementStore) -> PlacementController:
        config, ready, shape = self._config, self._ready, self._shape
        settings = PlanSettings(
            policy=config.placement_policy,
            groups=config.placement_groups,
            nodes=config.placement_nodes,
            min_gain=config.placement_min_gain,
        )
        try:
            no_load = np.zeros((shape.num_layers, shape.num_experts), np.int64)
            make_plan(no_load, slots_in_use(None, shape, ready.model_revision), shape, settings)
        except PlacementShapeError as error:
            raise ConfigError(
                f"placement_policy, placement_groups, placement_nodes: {error}"
            ) from error
        return PlacementController(
            store,
            engine_id=self._engine_id,
            model=ready.model,
            model_revision=ready.model_revision,
            shape=shape,
            settings=settings,
            interval_s=config.placement_interval_s,
        )


def member_of(
    config: FrontConfig,
    ready: CoreReady,
    engine_id: str,
    send: Callable[[ExpertPlacement], None],
) -> PlacementMember | None:
    """The engine's part, or None: a dense model has no placement, and none is set without etcd.

    Raises:
        ConfigError: a controller is configured that cannot work.
    """
    if ready.experts is None or not config.etcd:
        if config.placement_interval_s:
            lacking = "etcd is not configured" if ready.experts else "the model has no experts"
            log.warning("placement_interval_s is set for nothing: %s", lacking)
        return None
    return PlacementMember(config, ready, ready.experts, engine_id, send)
