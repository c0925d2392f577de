"""Puts the balancer's parts together, and starts and stops them in order."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from inferfleet_proto.admin.v1 import fleet_pb2_grpc
from services.balancer import fleet_servicer
from services.balancer.config import BalancerConfig, balancer_id_of
from services.balancer.engines.registry import EngineRegistry
from services.balancer.metrics import EngineGauges
from services.balancer.request import run_servicer
from services.balancer.request.dependencies import Dependencies, make_dependencies
from services.common import rpc
from services.common.config.settings import ConfigError
from services.common.etcd.client import Etcd
from services.common.etcd.config import connect
from services.common.etcd.registry import (
    BALANCERS_PREFIX,
    ENGINES_PREFIX,
    Registration,
    RegistryRecords,
    RegistryView,
)
from services.common.service import lifecycle
from services.common.service.advertise import advertised_address
from services.common.service.background import Background
from services.common.service.metrics import MetricsServer
from services.common.service.telemetry import Telemetry

log = logging.getLogger(__name__)

_STOP_S = 1.0
_HEALTH_S = 0.1


@dataclass(frozen=True)
class _Server:
    """A gRPC server that serves one service and its health."""

    service_name: str
    health: Any
    address: str

    async def set_serving(self, serving: bool) -> None:
        await rpc.set_health(self.health, (self.service_name,), serving=serving)


class BalancerService:
    """The balancer as `lifecycle.main` runs it.

    Args:
        records: records of the engines; by default those in etcd. For tests.
    """

    def __init__(
        self, config: BalancerConfig, telemetry: Telemetry, records: RegistryRecords | None = None
    ) -> None:
        self._config = config
        self._telemetry = telemetry
        self._given_records = records
        self._stack = AsyncExitStack()
        self._background = Background()
        self._servers: list[_Server] = []
        self._registration: Registration | None = None
        self._serving = False
        self.servicer: run_servicer.RunServicer | None = None
        self.dependencies: Dependencies | None = None
        self.address = ""
        """host:port for gateways; empty before `start`, as the two below."""
        self.admin_address = ""
        self.metrics_address = ""
        self._registered = ("", "")
        """The registered addresses for gateways and operators; empty before `start`."""

    async def start(self) -> None:
        """Listen, follow the engines and register.

        Raises:
            ConfigError: an address is in use, a file cannot be read, or etcd is not configured.
        """
        config, stack = self._config, self._stack
        membership = rpc.Membership.from_config(config)
        etcd = self._connect_etcd()
        records = await self._start_records(etcd)
        deps = self.dependencies = make_dependencies(
            config, membership, records, self._background, self._telemetry.tracer
        )
        stack.push_async_callback(deps.matcher.close)
        stack.push_async_callback(deps.registry.stop)
        stack.push_async_callback(self._background.close)
        deps.registry.start()
        await self._start_servers(deps, membership)
        self._start_metrics(deps, membership)
        self._serving = True
        self._background.spawn(self._follow_health(self._servers[0], deps.registry), "health")
        address = advertised_address(config, self.address, config.etcd)
        admin_port = self.admin_address.rpartition(":")[2]
        self._registered = (address, f"{address.rpartition(':')[0]}:{admin_port}")
        if etcd is not None:
            await self._register(etcd)
        # Pushed last, so that it runs first: running streams must end with a status.
        stack.push_async_callback(self._servicer().interrupt, _STOP_S)
        lifecycle.write_ready(
            config.ready_file,
            service="balancer",
            address=address,
            metrics_address=self.metrics_address,
        )
        log.info("balancer serves at %s, operators at %s", self.address, self.admin_address)

    async def drain(self) -> None:
        """Leave the registry, refuse new work, let streams end within `drain_grace_s`."""
        self._serving = False
        for server in self._servers:
            await server.set_serving(False)
        if self._registration is not None:
            await self._registration.stop()
        try:
            await asyncio.wait_for(self._servicer().drain(), self._config.drain_grace_s)
        except TimeoutError:
            log.warning(
                "streams still run after drain_grace_s = %g s; ending them",
                self._config.drain_grace_s,
            )

    async def stop(self) -> None:
        """Free everything, newest first; idempotent, safe after a failed start."""
        self._serving = False
        await self._stack.aclose()

    async def failed(self) -> str:
        """Return the reason when a background task has ended; never returns otherwise."""
        return await self._background.failed()

    def _servicer(self) -> run_servicer.RunServicer:
        assert self.servicer is not None, "the service was not started"
        return self.servicer

    def _connect_etcd(self) -> Etcd | None:
        if not self._config.etcd:
            if self._given_records is None:
                raise ConfigError("etcd: must name at least one host:port; engines register there")
            return None
        etcd = connect(self._config)
        self._stack.push_async_callback(etcd.close)
        return etcd

    async def _start_records(self, etcd: Etcd | None) -> RegistryRecords:
        if self._given_records is not None:
            return self._given_records
        assert etcd is not None
        view = RegistryView(etcd, ENGINES_PREFIX)
        await view.start()
        self._stack.push_async_callback(view.stop)
        return view

    async def _start_servers(self, deps: Dependencies, membership: rpc.Membership) -> None:
        config = self._config
        self.servicer = run_servicer.RunServicer(deps, self._telemetry.tracer)
        handler = self.servicer.handler()
        self.address = await self._start_server(
            membership,
            config.port,
            run_servicer.SERVICE_NAME,
            lambda server: server.add_generic_rpc_handlers((handler,)),
            lambda: self._registered[0],
        )
        admin = fleet_servicer.FleetServicer(deps.registry, deps.decisions, deps.admission.pump)
        self.admin_address = await self._start_server(
            membership,
            config.admin_port,
            fleet_servicer.SERVICE_NAME,
            partial(fleet_pb2_grpc.add_FleetServicer_to_server, admin),
            lambda: self._registered[1],
        )

    async def _start_server(
        self,
        membership: rpc.Membership,
        port: int,
        service_name: str,
        add: Callable[[grpc.aio.Server], None],
        address: Callable[[], str],
    ) -> str:
        """Serve one gRPC service on a port of its own; returns host:port."""
        server = rpc.make_server(membership=membership, address=address)
        add(server)
        health = rpc.add_health_and_reflection(server, (service_name,))
        bound = membership.bind(server, f"{self._config.host}:{port}")
        await server.start()
        self._stack.push_async_callback(server.stop, _STOP_S)
        self._servers.append(_Server(service_name, health, f"{self._config.host}:{bound}"))
        await self._servers[-1].set_serving(True)
        return self._servers[-1].address

    async def _follow_health(self, server: _Server, registry: EngineRegistry) -> None:
        """Report the Engine service as NOT_SERVING while no engine takes work.

        The health of the process (the empty name) stays SERVING.
        """
        status = health_pb2.HealthCheckResponse
        reported: bool | None = None
        while True:
            serving = registry.any_serving()
            if serving != reported and self._serving:
                await server.health.set(
                    server.service_name, status.SERVING if serving else status.NOT_SERVING
                )
                reported = serving
            await asyncio.sleep(_HEALTH_S)

    def _start_metrics(self, deps: Dependencies, membership: rpc.Membership) -> None:
        deps.metrics.watch(
            lambda: _engine_gauges(deps.registry),
            deps.admission.queued,
            lambda: int(deps.matcher.breaker.state(time.monotonic())),
        )
        server = MetricsServer(
            deps.metrics.registry,
            lambda: self._serving,
            self._telemetry.log_level,
            membership.token,
        )
        self.metrics_address = server.start(self._config.host, self._config.metrics_port)
        self._stack.callback(server.stop)

    async def _register(self, etcd: Etcd) -> None:
        name = balancer_id_of(self._config, int(self.address.rpartition(":")[2]))
        address, admin = self._registered
        record = json.dumps({"address": address, "admin_address": admin}).encode()
        self._registration = Registration(etcd, BALANCERS_PREFIX + name, lambda: record)
        await self._registration.start()
        self._stack.push_async_callback(self._registration.stop)


def _engine_gauges(registry: EngineRegistry) -> Iterable[EngineGauges]:
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
