"""Puts the KV-cache service together and runs its life."""

import asyncio
import gc
import logging
from collections.abc import Coroutine
from typing import Any

from opentelemetry import trace

from inferfleet_proto.internal.v1 import prefix_index_pb2_grpc
from services.common import rpc
from services.common.config.settings import ConfigError, read_secret
from services.common.service import lifecycle, telemetry
from services.common.service.metrics import MetricsServer
from services.kvcache.config import KvCacheConfig
from services.kvcache.index import PrefixIndex
from services.kvcache.link import StoreAwayError, StoreSettings, UnsuitableStoreError
from services.kvcache.metrics import Metrics
from services.kvcache.publish import Publishers
from services.kvcache.servicer import SERVICE_NAME, PrefixIndexServicer
from services.kvcache.store import Store
from services.kvcache.sweep import Sweeper

log = logging.getLogger(__name__)

CHECK_S = 0.5
_TOUCH_EVERY = 60
_STOP_S = 2.0


class KvCacheService:
    """The service as `lifecycle.run` wants it. It serves whether or not Redis answers."""

    def __init__(self, config: KvCacheConfig) -> None:
        self._config = config
        membership = rpc.Membership.from_config(config)
        self._membership = membership
        self._telemetry = telemetry.setup(
            "kvcache", otlp_endpoint=config.otlp_endpoint, log_level=config.log_level
        )
        self._metrics = Metrics()
        self._store = Store(_settings(config))
        self._index = PrefixIndex(
            self._store, entry_ttl_s=config.entry_ttl_s, max_entries=config.max_entries
        )
        self._publishers = Publishers(self._index, self._metrics)
        self._sweeper = Sweeper(
            self._store,
            self._metrics,
            entry_ttl_s=config.entry_ttl_s,
            max_entries=config.max_entries,
            interval_s=config.sweep_interval_s,
        )
        self._metrics_server = MetricsServer(
            self._metrics.registry,
            lambda: not self._draining,
            self._telemetry.log_level,
            membership.token,
        )
        self._server = rpc.make_server(membership=membership)
        self._health = rpc.add_health_and_reflection(self._server, [SERVICE_NAME])
        self._tasks: list[asyncio.Task[None]] = []
        self._draining = False
        self._failure: asyncio.Future[str] | None = None

    async def start(self) -> None:
        """Return when it serves.

        Raises:
            ConfigError: a port or a file cannot be had, or Redis cannot be used.
        """
        config = self._config
        self._failure = asyncio.get_running_loop().create_future()
        try:
            await self._store.start()
        except UnsuitableStoreError as error:
            raise ConfigError(f"redis: {error}") from error
        servicer = PrefixIndexServicer(
            store=self._store,
            index=self._index,
            publishers=self._publishers,
            sweeper=self._sweeper,
            metrics=self._metrics,
            # A span that goes nowhere is a tenth of what a Match costs here.
            tracer=self._telemetry.tracer if config.otlp_endpoint else trace.NoOpTracer(),
            match_timeout_s=config.match_timeout_s,
        )
        prefix_index_pb2_grpc.add_PrefixIndexServicer_to_server(servicer, self._server)
        port = self._membership.bind(self._server, f"{config.host}:{config.port}")
        await self._server.start()
        await rpc.set_health(self._health, [SERVICE_NAME], serving=True)
        metrics_address = self._metrics_server.start(config.host, config.metrics_port)
        self._spawn(self._sweeper.run(), "sweep")
        self._spawn(self._look_after(), "look after")
        address = config.advertise or f"{config.host}:{port}"
        gc.collect()
        gc.freeze()  # what lives as long as the service need not be looked at in mid-Match
        log.info("serving on %s, metrics on %s", address, metrics_address)
        lifecycle.write_ready(
            config.ready_file, service="kvcache", address=address, metrics_address=metrics_address
        )

    async def drain(self) -> None:
        """End the publishers' streams: they have no end of their own, and lose nothing by it."""
        self._draining = True
        await rpc.set_health(self._health, [SERVICE_NAME], serving=False)
        await self._server.stop(min(self._config.drain_grace_s, 0.5))

    async def stop(self) -> None:
        """Free everything."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_STOP_S)
        await self._server.stop(0)
        await self._store.close()
        self._metrics_server.stop()
        self._telemetry.close()

    async def failed(self) -> str:
        """A background task ended by a bug of ours."""
        assert self._failure is not None, "not started"
        return await self._failure

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        if task.cancelled() or self._failure is None or self._failure.done():
            return
        log.error("%s ended", task.get_name(), exc_info=task.exception())
        self._failure.set_result(f"{task.get_name()} ended: {task.exception()!r}")

    async def _look_after(self) -> None:
        """Keep publishers and store in step, records fresh and gauges current."""
        turn = 0
        while True:
            self._metrics.store_up.set(self._store.available)
            try:
                owners = await self._publishers.check()
                self._metrics.owners.set(len(owners))
                entries = await self._index.num_entries()
                self._metrics.entries.set(entries)
                if entries >= self._config.max_entries:
                    self._sweeper.want()
                if turn % _TOUCH_EVERY == 0:
                    silence_s = self._config.owner_ttl_s
                    if await self._index.touch(self._publishers.engines, silence_s):
                        self._sweeper.want()
                turn += 1
            except StoreAwayError as error:
                log.debug("nothing compared: %s", error)
            await asyncio.sleep(CHECK_S)


def _settings(config: KvCacheConfig) -> StoreSettings:
    def secret(key: str) -> str | None:
        path = getattr(config, key)
        return read_secret(path, key) if path else None

    return StoreSettings(
        url=config.redis,
        prefix=config.redis_prefix,
        password=secret("redis_password_file"),
        sentinel_password=secret("redis_sentinel_password_file"),
        tls_ca=config.redis_tls_ca_file,
        tls_cert=config.redis_tls_cert_file,
        tls_key=config.redis_tls_key_file,
    )
