"""gRPC health of the engine's services: SERVING while requests are taken and rounds finish."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from grpc_health.v1 import health

from services.common import rpc
from services.engine.front.load_report import LoadState

log = logging.getLogger(__name__)
_CHECK_INTERVAL_S = 0.25


class HealthMonitor:
    """Sets the health of each registered service from the load and from the core's state.

    Args:
        load_state: draining and stalled engines are NOT_SERVING.
        core_alive: whether requests can be sent to the core.
    """

    def __init__(self, load_state: LoadState, core_alive: Callable[[], bool]) -> None:
        self._load_state = load_state
        self._core_alive = core_alive
        self._services: list[tuple[health.aio.HealthServicer, str]] = []

    @property
    def serving(self) -> bool:
        """Whether the engine takes requests and makes progress."""
        state = self._load_state
        return self._core_alive() and not state.draining and not state.stalled

    def add_service(self, servicer: health.aio.HealthServicer, name: str) -> None:
        """Report the health of a gRPC service, by its full name, from the next `publish` on."""
        self._services.append((servicer, name))

    async def publish(self) -> None:
        """Set the current health of all services."""
        for servicer, name in self._services:
            await rpc.set_health(servicer, [name], serving=self.serving)

    async def watch(self, on_change: Callable[[], Awaitable[None]]) -> None:
        """Publish the health at each change, until cancelled.

        Args:
            on_change: awaited when the health, the drain flag or the placement version changed.
        """
        before = self._snapshot()
        while True:
            await asyncio.sleep(_CHECK_INTERVAL_S)
            now = self._snapshot()
            if now != before:
                if now[0] != before[0]:
                    log.info("health: %s", "serving" if now[0] else "not serving")
                await self.publish()
                await on_change()
            before = now

    def _snapshot(self) -> tuple[bool, bool, int]:
        state = self._load_state
        return self.serving, state.draining, state.placement_version
