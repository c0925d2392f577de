"""The gateway's parts put together, started, drained and stopped."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor

from opentelemetry.sdk.trace.export import SpanExporter
from prometheus_client import CollectorRegistry

from services.common import rpc
from services.common.config.settings import ConfigError
from services.common.etcd.config import connect
from services.common.etcd.model_alias import MODELS_PREFIX
from services.common.etcd.registry import BALANCERS_PREFIX, ENGINES_PREFIX, RegistryView
from services.common.service import lifecycle, telemetry
from services.common.service.metrics import MetricsServer
from services.gateway.balancers import Balancers
from services.gateway.callers.access import Access
from services.gateway.callers.tenants import Tenants
from services.gateway.callers.usage_recorder import Books
from services.gateway.config import GatewayConfig
from services.gateway.metrics import Metrics
from services.gateway.models.catalog import Catalog, addresses_of
from services.gateway.models.static_engines import StaticEngines
from services.gateway.models.text_store import TextStore
from services.gateway.openai.app import make_app
from services.gateway.openai.http_server import HttpServer
from services.gateway.request.admission import Door
from services.gateway.request.exchange import Rooms
from services.gateway.request.in_flight import InFlight
from services.gateway.servicer import SERVICE, InferenceServicer

log = logging.getLogger(__name__)

FIRST_LISTING_S = 5.0
# How long streams that are cut have to take their status.
LAST_WORDS_S = 1.0


def _nothing() -> None:
    """What is to be undone when nothing was done."""


class GatewayService:
    """See lifecycle.Service. Constructed inside the loop that it runs in."""

    def __init__(self, config: GatewayConfig, exporter: SpanExporter | None = None) -> None:
        if not config.etcd and not (config.engines and config.balancers):
            raise ConfigError("etcd: needed, unless both engines and balancers are given")
        self._config = config
        self._membership = rpc.Membership.from_config(config)
        self._telemetry = telemetry.setup(
            "gateway",
            otlp_endpoint=config.otlp_endpoint,
            log_level=config.log_level,
            exporter=exporter,
        )
        self._pool = ThreadPoolExecutor(config.text_threads, thread_name_prefix="text")
        self._etcd = connect(config) if config.etcd else None
        self._engines = self._view_of_engines()
        self._balancer_view = (
            RegistryView(self._etcd, BALANCERS_PREFIX)
            if self._etcd is not None and not config.balancers
            else None
        )
        self._alias_view = RegistryView(self._etcd, MODELS_PREFIX) if self._etcd else None
        self._catalog = Catalog(self._engines, config.aliases, records=self._alias_view)
        self._texts = TextStore(self._membership, self._pool)
        self._balancers = Balancers(
            self._balancer_addresses,
            self._membership,
            retry_s=config.connect_retry_s,
            stall_s=config.stall_timeout_s,
        )
        registry = CollectorRegistry()
        self._books = Books(config, registry)
        self._tenants = Tenants(config.api_keys_file, told=self._keys_read)
        access = Access(self._tenants, self._books.audit)
        self._metrics_server = MetricsServer(
            registry, lambda: self._serving, self._telemetry.log_level, self._membership.token
        )
        tracer = self._telemetry.tracer
        self._rooms = Rooms(
            door=Door(self._catalog, self._texts, self._pool, tracer),
            balancers=self._balancers,
            in_flight=InFlight(),
            metrics=Metrics(registry),
            tracer=tracer,
            request_timeout_s=config.request_timeout_s,
            quotas=self._books.quotas,
            audit=self._books.audit,
            usage=self._books.usage,
        )
        self._servicer = InferenceServicer(self._rooms, access, self._catalog)
        self._server = rpc.make_server()
        self._http = HttpServer(
            make_app(self._rooms, access, self._catalog),
            self._membership.files,
        )
        self._health = rpc.add_health_and_reflection(self._server, [SERVICE])
        self._tasks: list[asyncio.Task[None]] = []
        self._serving = False
        self._unfollow: Callable[[], None] = _nothing
        self._failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Serve both faces; engines may come later."""
        config = self._config
        await self._books.start()
        self._unfollow = self._telemetry.log_level.follow(
            lambda level: self._books.audit.act("log_level", level)
        )
        self._servicer.add_to(self._server)
        port = self._membership.bind(
            self._server, f"{config.host}:{config.port}", members_only=False
        )
        await self._engines.start()
        for view in (self._balancer_view, self._alias_view):
            if view is not None:
                await view.start()
        await self._first_listing()
        self._spawn(self._catalog.follow(self._models_changed), "catalog")
        self._spawn(self._tenants.follow(), "keys")
        if self._balancer_view is not None:
            self._spawn(self._follow_balancers(self._balancer_view), "balancers")
        self._balancers.prepare()
        http_address = await self._http.start(config.host, config.http_port)
        await self._server.start()
        metrics_address = self._metrics_server.start(config.host, config.metrics_port)
        await rpc.set_health(self._health, [SERVICE], serving=True)
        self._serving = True
        address = config.advertise or f"{config.host}:{port}"
        log.info("serving gRPC on %s and HTTP on %s", address, http_address)
        lifecycle.write_ready(
            config.ready_file,
            service="gateway",
            address=address,
            metrics_address=metrics_address,
            http_address=http_address,
        )

    async def drain(self) -> None:
        """Refuse new requests; running streams have the grace to end."""
        self._serving = False
        self._books.audit.act("drain", f"{len(self._rooms.in_flight)} requests in flight")
        await rpc.set_health(self._health, [SERVICE], serving=False)
        ended = await self._rooms.in_flight.drain(self._config.drain_grace_s)
        if not ended:
            log.warning("ending %d streams after the grace", len(self._rooms.in_flight))

    async def stop(self) -> None:
        """Free everything; idempotent."""
        self._serving = False
        self._unfollow()
        self._unfollow = _nothing
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # Here and not in the drain: a second signal ends that early.
        await self._rooms.in_flight.cut(LAST_WORDS_S)
        await self._http.stop()
        await self._server.stop(grace=LAST_WORDS_S)
        await self._books.close()
        await self._texts.close()
        await self._balancers.close()
        await self._engines.stop()
        for view in (self._balancer_view, self._alias_view):
            if view is not None:
                await view.stop()
        if self._etcd is not None:
            await self._etcd.close()
        self._metrics_server.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._telemetry.close)

    async def wait_carried(self) -> None:
        """Return once requests share a call to each balancer with others."""
        await self._balancers.wait_carried()

    async def failed(self) -> str:
        """The reason why the gateway cannot go on."""
        return await self._failure

    def _keys_read(self, good: bool, what: str) -> None:
        self._books.audit.act("keys", what, good=good)

    def _view_of_engines(self) -> RegistryView | StaticEngines:
        if self._etcd is not None:
            return RegistryView(self._etcd, ENGINES_PREFIX)
        return StaticEngines(self._config.engines, self._membership)

    def _balancer_addresses(self) -> Sequence[str]:
        if self._balancer_view is None:
            return self._config.balancers
        return addresses_of(self._balancer_view)

    async def _first_listing(self) -> None:
        """Wait a little for the registry, so that a ready gateway knows its models."""
        if not isinstance(self._engines, RegistryView):
            return
        try:
            async with asyncio.timeout(FIRST_LISTING_S):
                await self._engines.wait_listed()
                if self._alias_view is not None:
                    await self._alias_view.wait_listed()
        except TimeoutError:
            log.warning("etcd does not answer; models will be known once it does")

    async def _models_changed(self) -> None:
        self._texts.prefetch((*self._catalog.models, *self._catalog.revisions))
        if self._etcd is not None:
            await self._catalog.table.restore(self._etcd)

    async def _follow_balancers(self, view: RegistryView) -> None:
        version = 0
        while True:
            version = await view.wait_change(version)
            await self._balancers.forget_absent()
            self._balancers.prepare()

    def _spawn(self, work: Coroutine[None, None, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._watch)
        self._tasks.append(task)

    def _watch(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and not self._failure.done():
            error = task.exception()
            log.error("%s ended", task.get_name(), exc_info=error)
            self._failure.set_result(f"{task.get_name()} ended: {error!r}")
