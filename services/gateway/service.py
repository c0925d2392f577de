"""Puts the gateway's parts together: starts, drains and stops them."""

import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

from services.common import rpc
from services.common.config.settings import ConfigError
from services.common.etcd.registry import RegistryView
from services.common.service import lifecycle
from services.common.service.advertise import advertised_address
from services.common.service.background import Background
from services.common.service.metrics import MetricsServer
from services.common.service.telemetry import Telemetry
from services.gateway.balancers import Balancers
from services.gateway.callers.access import Access
from services.gateway.callers.records.audit import Audit
from services.gateway.callers.tenants import Tenants
from services.gateway.callers.usage_recorder import UsageRecorder
from services.gateway.config import GatewayConfig
from services.gateway.metrics import GatewayMetrics
from services.gateway.models.catalog import Catalog
from services.gateway.models.fleet_registry import FleetRegistry
from services.gateway.models.renderer import Renderer
from services.gateway.models.text_store import TextStore
from services.gateway.openai.app import make_app
from services.gateway.openai.http_bounds import HttpBounds
from services.gateway.openai.http_server import HttpServer
from services.gateway.request.admission import RequestAdmission
from services.gateway.request.dependencies import Dependencies
from services.gateway.request.in_flight import InFlight
from services.gateway.request.text_calls import TextCalls
from services.gateway.servicer import SERVICE, InferenceServicer

log = logging.getLogger(__name__)

# How long aborted streams have to send their status.
ABORT_S = 1.0


@dataclass(frozen=True)
class _Parts:
    """The parts of a gateway that starts or runs."""

    membership: rpc.Membership
    metrics_server: MetricsServer
    registry: FleetRegistry
    catalog: Catalog
    texts: TextStore
    recorder: UsageRecorder
    tenants: Tenants
    dependencies: Dependencies


class GatewayService:
    """See lifecycle.Service."""

    def __init__(self, config: GatewayConfig, telemetry: Telemetry) -> None:
        if not config.etcd and not (config.engines and config.balancers):
            raise ConfigError("etcd: needed, unless both engines and balancers are given")
        self._config = config
        self._telemetry = telemetry
        self._stack = contextlib.AsyncExitStack()
        self._background = Background()
        self._parts: _Parts | None = None
        self._health: Any = None
        self._serving = False

    async def start(self) -> None:
        """Serve both faces; engines may come later.

        Raises:
            ConfigError: an option cannot be used.
        """
        config = self._config
        parts = self._parts = self._assemble()
        await parts.recorder.start()
        await parts.registry.start()
        self._follow_changes(parts)
        port, http_address = await self._serve(parts)
        metrics_address = parts.metrics_server.start(config.host, config.metrics_port)
        await rpc.set_health(self._health, [SERVICE], serving=True)
        self._serving = True
        address = advertised_address(config, f"{config.host}:{port}")
        log.info("serving gRPC on %s and HTTP on %s", address, http_address)
        lifecycle.write_ready(
            config.ready_file,
            service="gateway",
            address=address,
            metrics_address=metrics_address,
            http_address=http_address,
        )

    async def drain(self) -> None:
        """Refuse new requests; running ones have `drain_grace_s` to end."""
        self._serving = False
        dependencies = self._running.dependencies
        in_flight = dependencies.in_flight
        dependencies.audit.record_action("drain", f"{len(in_flight)} requests in flight")
        await rpc.set_health(self._health, [SERVICE], serving=False)
        ended = await in_flight.drain(self._config.drain_grace_s)
        if not ended:
            log.warning("aborting %d requests at the end of drain_grace_s", len(in_flight))

    async def stop(self) -> None:
        """Free everything; idempotent."""
        self._serving = False
        await self._stack.aclose()

    async def wait_carried(self) -> None:
        """Return once requests to every balancer share one call (see docs/adr/0011)."""
        await self._running.dependencies.balancers.wait_carried()

    async def failed(self) -> str:
        """The reason why the gateway cannot continue."""
        return await self._background.failed()

    @property
    def _running(self) -> _Parts:
        assert self._parts is not None, "the gateway is not started"
        return self._parts

    def _assemble(self) -> _Parts:
        """Make all parts and register their ends; connects to nothing yet."""
        config, stack, tracer = self._config, self._stack, self._telemetry.tracer
        membership = rpc.Membership.from_config(config)
        series = CollectorRegistry()
        registry = FleetRegistry(config, membership)
        stack.push_async_callback(registry.close)
        pool = ThreadPoolExecutor(config.text_threads, thread_name_prefix="text")
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        # Threads of their own, so that the prompts of generations never wait for these calls.
        calls_pool = ThreadPoolExecutor(max(config.text_threads // 2, 1), "text-calls")
        stack.callback(calls_pool.shutdown, wait=False, cancel_futures=True)
        renderer = Renderer(timeout_s=config.template_timeout_s, processes=config.text_threads)
        stack.push_async_callback(renderer.close)
        metrics_server = MetricsServer(
            series, lambda: self._serving, self._telemetry.log_level, membership.token
        )
        stack.callback(metrics_server.stop)
        catalog = Catalog(registry.engines, config.aliases, records=registry.aliases)
        texts = TextStore(membership, pool)
        stack.push_async_callback(texts.close)
        balancers = Balancers(
            registry.balancer_addresses,
            membership,
            retry_s=config.connect_retry_s,
            stall_s=config.stall_timeout_s,
            registered=registry.balancers is not None,
        )
        stack.push_async_callback(balancers.close)
        recorder = UsageRecorder(config, series)
        stack.push_async_callback(recorder.close)
        metrics = GatewayMetrics(series)
        dependencies = Dependencies(
            admission=RequestAdmission(
                catalog, texts, pool, tracer, calls_pool=calls_pool, renderer=renderer
            ),
            balancers=balancers,
            in_flight=InFlight(),
            metrics=metrics,
            tracer=tracer,
            request_timeout_s=config.request_timeout_s,
            quotas=recorder.quotas,
            audit=recorder.audit,
            text_calls=TextCalls(recorder.quotas, recorder.audit, metrics),
            usage=recorder.usage,
        )
        tenants = _tenants(config, recorder.audit)
        return _Parts(
            membership, metrics_server, registry, catalog, texts, recorder, tenants, dependencies
        )

    def _follow_changes(self, parts: _Parts) -> None:
        """Follow models, API keys, balancers and the log level in the background."""
        audit = parts.recorder.audit
        self._stack.callback(
            self._telemetry.log_level.follow(lambda level: audit.record_action("log_level", level))
        )
        self._stack.push_async_callback(self._background.close)
        models = parts.catalog.follow(lambda: _use_models(parts))
        self._background.spawn(models, "catalog")
        self._background.spawn(parts.tenants.follow(), "keys")
        view, balancers = parts.registry.balancers, parts.dependencies.balancers
        if view is not None:
            self._background.spawn(_follow_balancers(view, balancers), "balancers")
        balancers.prepare()

    async def _serve(self, parts: _Parts) -> tuple[int, str]:
        """Listen on both faces; returns the gRPC port and the HTTP host:port."""
        config, dependencies = self._config, parts.dependencies
        metrics = dependencies.metrics
        access = Access(parts.tenants, parts.recorder.audit, metrics)
        server = rpc.make_server()
        self._stack.push_async_callback(server.stop, grace=ABORT_S)
        self._health = rpc.add_health_and_reflection(server, [SERVICE])
        InferenceServicer(dependencies, access, parts.catalog).add_to(server)
        port = parts.membership.bind(server, f"{config.host}:{config.port}", members_only=False)
        app = make_app(dependencies, access, parts.catalog, cors_origins=config.cors_origins)
        http = HttpServer(
            app,
            parts.membership.files,
            bounds=HttpBounds(
                head_s=config.http_head_timeout_s,
                body_silence_s=config.http_body_timeout_s,
                open_heads=config.http_open_heads,
            ),
            on_refused=lambda status: metrics.http_refusals.labels(str(status)).inc(),
        )
        self._stack.push_async_callback(http.stop)
        # At the stop and not in the drain, because a second signal ends the drain early.
        self._stack.push_async_callback(dependencies.in_flight.abort_all, ABORT_S)
        http_address = await http.start(config.host, config.http_port)
        await server.start()
        return port, http_address


def _tenants(config: GatewayConfig, audit: Audit) -> Tenants:
    def record_reload(usable: bool, description: str) -> None:
        audit.record_action("keys", description, succeeded=usable)

    return Tenants(config.api_keys_file, on_reload=record_reload)


async def _use_models(parts: _Parts) -> None:
    """Fetch the texts of new models, and restore alias records that etcd has lost."""
    catalog, etcd = parts.catalog, parts.registry.etcd
    parts.texts.prefetch((*catalog.models, *catalog.revisions))
    if etcd is not None:
        await catalog.table.restore(etcd)


async def _follow_balancers(view: RegistryView, balancers: Balancers) -> None:
    """Connect to new balancers and disconnect from absent ones, forever."""
    version = 0
    while True:
        version = await view.wait_change(version)
        await balancers.forget_absent()
        balancers.prepare()
