"""Quotas, usage records and the audit log, made as the configuration says."""

import asyncio
import os
import uuid
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter

from services.common.config.redis_keys import connect
from services.common.config.settings import ConfigError
from services.gateway.callers.quota.quotas import Quotas
from services.gateway.callers.quota.shared import SharedCounts
from services.gateway.callers.records.audit import Audit
from services.gateway.callers.records.line_log import LineLog, Sink
from services.gateway.callers.records.stream_log import StreamLog
from services.gateway.config import GatewayConfig

STREAM_TIMEOUT_S = 1.0
MIB = 1024 * 1024


class UsageRecorder:
    """Owns `quotas`, the `usage` sinks and `audit`; made and used in the gateway's loop.

    Raises:
        ConfigError: usage_stream is set without redis.
    """

    def __init__(self, config: GatewayConfig, registry: CollectorRegistry) -> None:
        self._lost = Counter(
            "inferfleet_gateway_records_lost",
            "Usage and audit records that could not be written",
            ("sink",),
            registry=registry,
        )
        self.quotas = Quotas(_shared_counts(config), registry)
        self._usage_log = self._line_log(config, "usage_file", config.usage_file)
        self._audit_log = self._line_log(config, "audit_file", config.audit_file)
        self._stream = self._stream_log(config) if config.usage_stream else None
        self.audit = Audit(self._audit_log)
        sinks: tuple[Sink | None, ...] = (self._usage_log, self._stream)
        self.usage = tuple(sink for sink in sinks if sink is not None)

    async def start(self) -> None:
        """Open the files and connect to Redis.

        Raises:
            ConfigError: a file cannot be written.
        """
        for key, line_log in (("usage_file", self._usage_log), ("audit_file", self._audit_log)):
            try:
                if line_log is not None:
                    line_log.start()
            except OSError as error:
                raise ConfigError(f"{key}: cannot write it: {error}") from error
        if self._stream is not None:
            self._stream.start()
        await self.quotas.start()

    async def close(self) -> None:
        """Settle quotas and write queued records, within seconds; idempotent."""
        await self.quotas.stop()
        if self._stream is not None:
            await self._stream.close()
        for line_log in (self._usage_log, self._audit_log):
            if line_log is not None:
                await asyncio.to_thread(line_log.close)

    def _line_log(self, config: GatewayConfig, key: str, path: str) -> LineLog | None:
        if not path:
            return None
        return LineLog(
            path,
            max_bytes=config.record_file_mib * MIB,
            kept=config.record_files_kept,
            on_loss=self._count_losses(key),
        )

    def _stream_log(self, config: GatewayConfig) -> StreamLog:
        if not config.redis:
            raise ConfigError("redis: needed, because usage_stream is set")
        return StreamLog(
            connect(config, timeout_s=STREAM_TIMEOUT_S, name="inferfleet-usage"),
            config.usage_stream,
            max_entries=config.usage_stream_entries,
            on_loss=self._count_losses("usage_stream"),
        )

    def _count_losses(self, sink: str) -> Callable[[int], None]:
        counter = self._lost.labels(sink)
        return lambda number: counter.inc(number)


def _shared_counts(config: GatewayConfig) -> SharedCounts | None:
    if not config.redis:
        return None
    client = connect(config, timeout_s=config.quota_timeout_s, name="inferfleet-gateway")
    return SharedCounts(
        client,
        gateway=f"{os.uname().nodename}-{uuid.uuid4().hex[:12]}",
        prefix=config.quota_prefix,
        timeout_s=config.quota_timeout_s,
    )
