"""The balancer as a service: builds the rooms, joins them, starts and stops them in order."""

import asyncio
import json
import logging
import random
import time
from collections.abc import Callable, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from inferfleet_proto.admin.v1 import fleet_pb2_grpc
from services.balancer import fleet_servicer
from services.balancer.config import BalancerConfig, balancer_id_of
from services.balancer.engines.engine_view import CostModel
from services.balancer.engines.registry import EngineKeys, EngineRegistry
from services.balancer.metrics import EngineGauges, Stats
from services.balancer.queue.admission import Admission
from services.balancer.request import run_servicer
from services.balancer.request.exchange import Rooms
from services.balancer.routing.decision_ledger import DecisionLedger
from services.balancer.routing.prefix_match import PrefixMatcher
from services.balancer.routing.router import Router
from services.common import rpc
from services.common.config.settings import ConfigError
from services.common.etcd.client import Etcd
from services.common.etcd.config import connect
from services.common.etcd.registry import (
    BALANCERS_PREFIX,
    ENGINES_PREFIX,
    Registration,
    RegistryView,
)
from services.common.service import lifecycle
from services.common.service.advertise import advertised_address
from services.common.service.metrics import MetricsServer
from services.common.service.telemetry import Telemetry

log = logging.getLogger(__name__)

_CUT_S = 1.0
_HEALTH_S = 0.1


class BalancerService:
    """lifecycle.Service of a balancer.

    Args:
        keys: used instead of etcd's view of the engines, for tests.
    """

    def __init__(
        self, config: BalancerConfig, telemetry: Telemetry, keys: EngineKeys | None = None
    ) -> None:
        self._config = config
        self._telemetry = telemetry
        self._given_keys = keys
        self._membership = rpc.Membership.from_config(config)
        self._closers: list[Callable[[], Any]] = []
        self._servicer: run_servicer.RunServicer | None = None
        self._registration: Registration | None = None
        self._health: list[tuple[Any, str]] = []
        self._serving = False
        self.address = ""
        self.admin_address = ""
        self.metrics_address = ""
        self.rooms: Rooms | None = None

    async def start(self) -> None:
        """Listen, follow the fleet and register.

        Raises:
            ConfigError: an address cannot be had, or there is nowhere to find engines.
        """
        etcd = self._make_etcd()
        keys = self._given_keys
        if keys is None:
            assert etcd is not None
            view = RegistryView(etcd, ENGINES_PREFIX)
            await view.start()
            self._closers.append(view.stop)
            keys = view
        rooms = self.rooms = self._make_rooms(keys)
        self._closers.append(rooms.matcher.close)
        await rooms.registry.start()
        self._closers.append(rooms.registry.stop)
        self._servicer = run_servicer.RunServicer(rooms, self._telemetry.tracer)
        self.address = await self._serve(
            self._config.port,
            run_servicer.SERVICE_NAME,
            lambda server: server.add_generic_rpc_handlers((self._servicer_of().handler(),)),
        )
        admin = fleet_servicer.FleetServicer(
            rooms.registry, rooms.decisions, self._membership.metadata, rooms.admission.pump
        )
        self.admin_address = await self._serve(
            self._config.admin_port,
            fleet_servicer.SERVICE_NAME,
            lambda server: fleet_pb2_grpc.add_FleetServicer_to_server(admin, server),
        )
        self._start_metrics(rooms)
        self._serving = True
        watch = asyncio.create_task(self._tell_health(rooms.registry), name="health")
        self._closers.append(lambda: _ended(watch))
        await self._register(etcd)
        lifecycle.write_ready(
            self._config.ready_file,
            service="balancer",
            address=self._advertised,
            metrics_address=self.metrics_address,
        )
        log.info("balancer serves at %s, operators at %s", self.address, self.admin_address)

    async def drain(self) -> None:
        """Leave the registry, refuse new work, let streams end within the grace."""
        self._serving = False
        for servicer, name in self._health:
            await rpc.set_health(servicer, (name,), serving=False)
        if self._registration is not None:
            await self._registration.stop()
        try:
            await asyncio.wait_for(self._servicer_of().drain(), self._config.drain_grace_s)
        except TimeoutError:
            log.warning("the grace is over: running streams are ended")

    async def stop(self) -> None:
        """Free everything, newest first; idempotent, safe after a failed start."""
        self._serving = False
        if self._servicer is not None:
            # Here and not in the drain: a second signal ends that early.
            await self._servicer.cut(_CUT_S)
        while self._closers:
            result = self._closers.pop()()
            if result is not None:
                await result

    async def failed(self) -> str:
        """Never: whatever is away comes back or is done without."""
        return await lifecycle.never()

    @property
    def _advertised(self) -> str:
        return advertised_address(self._config, self.address, self._config.etcd)

    def _servicer_of(self) -> run_servicer.RunServicer:
        assert self._servicer is not None
        return self._servicer

    def _make_etcd(self) -> Etcd | None:
        if not self._config.etcd:
            if self._given_keys is None:
                raise ConfigError("etcd: must name at least one host:port; engines register there")
            return None
        etcd = connect(self._config)
        self._closers.append(etcd.close)
        return etcd

    def _make_rooms(self, keys: EngineKeys) -> Rooms:
        config, stats = self._config, Stats()
        # Registry and door know each other only through these two calls.
        registry = EngineRegistry(
            config, self._membership, keys, changed=lambda: admission.pump(), clock=time.monotonic
        )
        admission = Admission(
            registry.views,
            queue_size=config.queue_size,
            headroom=config.engine_headroom,
            patience_s=config.patience_s,
        )
        matcher = PrefixMatcher(
            config.kvcache,
            self._membership,
            timeout_s=config.match_timeout_s,
            tracer=self._telemetry.tracer,
            observe=lambda outcome, seconds: stats.match_s.labels(outcome).observe(seconds),
        )
        router = Router(
            config.policy,
            registry.views,
            admission.has_room,
            cost=CostModel(pressure_s=config.pressure_s),
            rng=random.Random(),
            observe=stats.decision_s.observe,
        )
        decisions = DecisionLedger(config.explain_requests)
        metadata = self._membership.metadata
        return Rooms(config, metadata, registry, admission, matcher, router, decisions, stats)

    async def _serve(self, port: int, name: str, add: Callable[[grpc.aio.Server], None]) -> str:
        server = rpc.make_server(membership=self._membership)
        add(server)
        self._health.append((rpc.add_health_and_reflection(server, (name,)), name))
        bound = self._membership.bind(server, f"{self._config.host}:{port}")
        await server.start()
        self._closers.append(lambda: server.stop(_CUT_S))
        await rpc.set_health(self._health[-1][0], (name,), serving=True)
        return f"{self._config.host}:{bound}"

    async def _tell_health(self, registry: EngineRegistry) -> None:
        """Engine is NOT_SERVING while no engine takes work; the process itself ("") is well."""
        status, told = health_pb2.HealthCheckResponse, None
        servicer, name = self._health[0]
        while True:
            serving = registry.any_serving()
            if serving != told and self._serving:
                await servicer.set(name, status.SERVING if serving else status.NOT_SERVING)
                told = serving
            await asyncio.sleep(_HEALTH_S)

    def _start_metrics(self, rooms: Rooms) -> None:
        rooms.stats.watch(
            lambda: _gauges(rooms.registry),
            rooms.admission.queued,
            lambda: int(rooms.matcher.breaker.state(time.monotonic())),
        )
        metrics = MetricsServer(rooms.stats.registry, lambda: self._serving, self._membership.token)
        self.metrics_address = metrics.start(self._config.host, self._config.metrics_port)
        self._closers.append(metrics.stop)

    async def _register(self, etcd: Etcd | None) -> None:
        if etcd is None:
            return
        name = balancer_id_of(self._config, int(self.address.rpartition(":")[2]))
        host, _, _ = self._advertised.rpartition(":")
        admin = f"{host}:{self.admin_address.rpartition(':')[2]}"
        value = json.dumps({"address": self._advertised, "admin_address": admin})
        self._registration = Registration(etcd, BALANCERS_PREFIX + name, lambda: value.encode())
        await self._registration.start()
        self._closers.append(self._registration.stop)


async def _ended(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.wait({task})


def _gauges(registry: EngineRegistry) -> Iterable[EngineGauges]:
    now = time.monotonic()
    return [
        EngineGauges(
            engine_id=member.info.engine_id,
            model=member.info.model,
            state=member.state(now).value,
            in_flight=member.in_flight,
            breaker=int(member.breaker.state(now)),
        )
        for member in registry.members()
    ]
