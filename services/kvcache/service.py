"""The KV-cache service: makes its parts, starts and stops them."""

import asyncio
import contextlib
import gc
import logging

import grpc
from grpc_health.v1 import health
from opentelemetry import trace

from inferfleet_proto.internal.v1 import prefix_index_pb2_grpc
from services.common import rpc
from services.common.config.settings import ConfigError, read_secret
from services.common.service import lifecycle
from services.common.service.advertise import advertised_address
from services.common.service.background import Background
from services.common.service.metrics import MetricsServer
from services.common.service.telemetry import Telemetry
from services.kvcache.config import KvCacheConfig
from services.kvcache.index import PrefixIndex
from services.kvcache.metrics import KvCacheMetrics
from services.kvcache.publishers import Publishers
from services.kvcache.redis_connection import RedisUnavailableError, UnsuitableRedisError
from services.kvcache.redis_settings import RedisSettings
from services.kvcache.servicer import SERVICE_NAME, PrefixIndexServicer
from services.kvcache.sweeper import Sweeper

log = logging.getLogger(__name__)

CHECK_S = 0.5
_CHECKS_PER_TOUCH = 60
_MAX_STOP_GRACE_S = 0.5


class KvCacheService:
    """The service as `lifecycle.main` runs it. It serves whether or not Redis is available.

    Raises:
        ConfigError: a file with a secret or a certificate cannot be used.
    """

    def __init__(self, config: KvCacheConfig, telemetry: Telemetry) -> None:
        self._config = config
        self._telemetry = telemetry
        self._membership = rpc.Membership.from_config(config)
        self._metrics = KvCacheMetrics()
        self._index = PrefixIndex(
            _redis_settings(config), entry_ttl_s=config.entry_ttl_s, max_entries=config.max_entries
        )
        self._sweeper = Sweeper(self._index, self._metrics, interval_s=config.sweep_interval_s)
        self._publishers = Publishers(self._index, self._metrics, self._sweeper.request)
        self._background = Background()
        self._stack = contextlib.AsyncExitStack()
        self._server: grpc.aio.Server | None = None
        self._health: health.aio.HealthServicer | None = None
        self._draining = False

    async def start(self) -> None:
        """Connect to Redis, then listen.

        Raises:
            ConfigError: Redis cannot be used, or a port is taken or not allowed.
        """
        self._stack.push_async_callback(self._index.close)
        try:
            await self._index.start()
        except UnsuitableRedisError as error:
            raise ConfigError(f"redis: {error}") from error
        address = await self._start_server()
        metrics_address = self._start_metrics()
        self._stack.push_async_callback(self._background.close)
        self._background.spawn(self._sweeper.run(), "sweep")
        self._background.spawn(self._keep_checking(), "check")
        gc.collect()
        gc.freeze()  # objects that live as long as the service need no collection during a Match
        log.info("serving on %s, metrics on %s", address, metrics_address)
        lifecycle.write_ready(
            self._config.ready_file,
            service="kvcache",
            address=address,
            metrics_address=metrics_address,
        )

    async def drain(self) -> None:
        """End the Publish streams, which have no end of their own and lose nothing by it."""
        self._draining = True
        if self._server is None or self._health is None:
            return
        await rpc.set_health(self._health, [SERVICE_NAME], serving=False)
        await self._server.stop(min(self._config.drain_grace_s, _MAX_STOP_GRACE_S))

    async def stop(self) -> None:
        """Stop all parts, the newest first; idempotent, and safe after a failed start."""
        await self._stack.aclose()

    async def failed(self) -> str:
        """Return the reason when a background task has ended because of a bug."""
        return await self._background.failed()

    async def _start_server(self) -> str:
        config = self._config
        self._server = server = rpc.make_server(membership=self._membership)
        self._health = rpc.add_health_and_reflection(server, [SERVICE_NAME])
        servicer = PrefixIndexServicer(
            index=self._index,
            publishers=self._publishers,
            sweeper=self._sweeper,
            metrics=self._metrics,
            # A span without a collector takes a tenth of the time of a Match.
            tracer=self._telemetry.tracer if config.otlp_endpoint else trace.NoOpTracer(),
            match_timeout_s=config.match_timeout_s,
        )
        prefix_index_pb2_grpc.add_PrefixIndexServicer_to_server(servicer, server)
        port = self._membership.bind(server, f"{config.host}:{config.port}")
        await server.start()
        self._stack.push_async_callback(server.stop, 0)
        await rpc.set_health(self._health, [SERVICE_NAME], serving=True)
        return advertised_address(config, f"{config.host}:{port}")

    def _start_metrics(self) -> str:
        server = MetricsServer(
            self._metrics.registry,
            lambda: not self._draining,
            self._telemetry.log_level,
            self._membership.token,
        )
        address = server.start(self._config.host, self._config.metrics_port)
        self._stack.callback(server.stop)
        return address

    async def _keep_checking(self) -> None:
        """Compare publishers with the index, renew the engines' records, update the gauges."""
        checks = 0
        while True:
            self._metrics.store_up.set(self._index.available)
            try:
                await self._check(touch=checks % _CHECKS_PER_TOUCH == 0)
                checks += 1
            except RedisUnavailableError as error:
                log.debug("publishers were not compared with the index: %s", error)
            await asyncio.sleep(CHECK_S)

    async def _check(self, *, touch: bool) -> None:
        owners = await self._publishers.check()
        self._metrics.owners.set(len(owners))
        entries = await self._index.num_entries()
        self._metrics.entries.set(entries)
        if entries >= self._config.max_entries:
            self._sweeper.request()
        if touch and await self._index.touch(self._publishers.engines, self._config.owner_ttl_s):
            self._sweeper.request()


def _redis_settings(config: KvCacheConfig) -> RedisSettings:
    def secret(key: str) -> str | None:
        path = getattr(config, key)
        return read_secret(path, key) if path else None

    return RedisSettings(
        url=config.redis,
        prefix=config.redis_prefix,
        password=secret("redis_password_file"),
        sentinel_password=secret("redis_sentinel_password_file"),
        tls_ca=config.redis_tls_ca_file,
        tls_cert=config.redis_tls_cert_file,
        tls_key=config.redis_tls_key_file,
    )
