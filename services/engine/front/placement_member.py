"""An engine's part in the expert placement of its group.

It follows the group's map, publishes its expert loads, and runs a candidate for the controller.
"""

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
    """Connects one engine to its placement group; owns a connection to etcd.

    Args:
        send: sends a placement to the core; never blocks.

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
        store = PlacementStore(self._etcd, group_of(ready.info.model, ready.info.model_revision))
        self._applied_key = Registration(
            self._etcd, store.keys.applied(engine_id), lambda: encode(self._watcher.applied)
        )
        self._loads_key = Registration(
            self._etcd, store.keys.loads(engine_id), self._encode_loads, _LOADS_TTL_S
        )
        self._watcher = PlacementWatcher(
            store,
            engine_id=engine_id,
            model_revision=ready.info.model_revision,
            shape=shape,
            send=send,
            on_applied=self._applied_key.refresh_soon,
        )
        self._controller = self._make_controller(store) if config.placement_interval_s else None

    def handle_report(self, report: RoundReport) -> None:
        """Take the placement version and the expert loads from a report; returns at once."""
        self._watcher.handle_report(report)
        if report.expert_loads is not None:
            self._load = tuple(tuple(row) for row in report.expert_loads)
            self._loads_key.refresh_soon()

    async def start(self) -> None:
        """Begin to publish; returns at once, also if etcd is unavailable."""
        await self._applied_key.start()
        await self._loads_key.start()
        if self._controller is not None:
            await self._controller.start()

    async def run(self) -> None:
        """Follow the map, and plan while this engine is the leader; runs until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watcher.run())
            if self._controller is not None:
                tasks.create_task(self._controller.run())

    async def close(self) -> None:
        """Resign, delete the engine's keys and close the connection; idempotent."""
        if self._controller is not None:
            await self._controller.close()
        await asyncio.gather(self._applied_key.stop(), self._loads_key.stop())
        await self._etcd.close()

    def _encode_loads(self) -> bytes:
        return encode(
            EngineLoads(
                engine_id=self._engine_id,
                model=self._ready.info.model,
                model_revision=self._ready.info.model_revision,
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
            make_plan(
                no_load, slots_in_use(None, shape, ready.info.model_revision), shape, settings
            )
        except PlacementShapeError as error:
            raise ConfigError(
                f"placement_policy, placement_groups, placement_nodes: {error}"
            ) from error
        return PlacementController(
            store,
            engine_id=self._engine_id,
            model=ready.info.model,
            model_revision=ready.info.model_revision,
            shape=shape,
            settings=settings,
            interval_s=config.placement_interval_s,
        )


def make_placement_member(
    config: FrontConfig,
    ready: CoreReady,
    engine_id: str,
    send: Callable[[ExpertPlacement], None],
) -> PlacementMember | None:
    """Return the engine's member, or None for a model without experts or an engine without etcd.

    Raises:
        ConfigError: a controller is configured that cannot plan.
    """
    if ready.info.experts is None or not config.etcd:
        if config.placement_interval_s:
            missing = "etcd is not configured" if ready.info.experts else "the model has no experts"
            log.warning("placement_interval_s has no effect: %s", missing)
        return None
    return PlacementMember(config, ready, ready.info.experts, engine_id, send)
