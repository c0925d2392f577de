"""Sends usage records to a Redis stream of bounded length, for billing in near real time."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec
from redis.exceptions import RedisError

from services.common.tasks import cancel_and_wait

log = logging.getLogger(__name__)

QUEUED = 10_000
TIMEOUT_S = 1.0
RETRY_S = 1.0
FLUSH_S = 1.0
WARN_EVERY_S = 30.0
_REDIS_ERRORS = (RedisError, OSError, TimeoutError)


class StreamLog:
    """Owned by the gateway's loop. A record may occur twice after a call that timed out.

    Args:
        client: of redis.asyncio.
        key: of the stream; each entry has one field, `record`, a JSON object.
        max_entries: approximate number of entries that are kept.
        on_loss: called with the number of records that could not be sent.
    """

    def __init__(
        self, client: Any, key: str, *, max_entries: int, on_loss: Callable[[int], None]
    ) -> None:
        self._client = client
        self._key = key
        self._max_entries = max_entries
        self._on_loss = on_loss
        self._queue: asyncio.Queue[bytes] = asyncio.Queue(QUEUED)
        self._encoder = msgspec.json.Encoder()
        self._task: asyncio.Task[None] | None = None
        self._warned_s = -WARN_EVERY_S

    def start(self) -> None:
        """Start sending."""
        self._task = asyncio.create_task(self._send_all(), name="usage stream")

    def put(self, record: msgspec.Struct) -> None:
        """Queue a record; it is lost if the queue is full."""
        try:
            self._queue.put_nowait(self._encoder.encode(record))
        except asyncio.QueueFull:
            self._on_loss(1)

    async def close(self) -> None:
        """Send queued records, for at most a second; idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await self._queue.join()
        await cancel_and_wait(task)
        if not self._queue.empty():
            self._on_loss(self._queue.qsize())
        with contextlib.suppress(*_REDIS_ERRORS):
            await self._client.aclose()
            await self._client.connection_pool.disconnect()

    async def _send_all(self) -> None:
        while True:
            record = await self._queue.get()
            try:
                while True:
                    if await self._send(record):
                        break
                    await asyncio.sleep(RETRY_S)
            except asyncio.CancelledError:
                self._on_loss(1)
                raise
            finally:
                self._queue.task_done()

    async def _send(self, record: bytes) -> bool:
        """Send one record; returns whether Redis confirmed it in time."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._client.xadd(
                    self._key, {"record": record}, maxlen=self._max_entries, approximate=True
                )
        except _REDIS_ERRORS as error:
            now = time.monotonic()
            if now - self._warned_s >= WARN_EVERY_S:
                self._warned_s = now
                log.warning(
                    "cannot send usage records to Redis, will retry: %s", error or "timeout"
                )
            return False
        return True
