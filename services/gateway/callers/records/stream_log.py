"""Usage records into a Redis stream of bounded length, for those who bill as things happen."""

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
_PASS_ON = (RedisError, OSError, TimeoutError)


class StreamLog:
    """Owned by the gateway's loop. A record may be there twice after a call that timed out.

    Args:
        client: of redis.asyncio.
        key: of the stream; each entry has one field, `record`, a JSON object.
        max_entries: about so many are kept.
        lost: called with a number of records that did not get there.
    """

    def __init__(
        self, client: Any, key: str, *, max_entries: int, lost: Callable[[int], None]
    ) -> None:
        self._client = client
        self._key = key
        self._max_entries = max_entries
        self._lost = lost
        self._queue: asyncio.Queue[bytes] = asyncio.Queue(QUEUED)
        self._encoder = msgspec.json.Encoder()
        self._task: asyncio.Task[None] | None = None
        self._warned_s = -WARN_EVERY_S

    def start(self) -> None:
        """Begin to send."""
        self._task = asyncio.create_task(self._send_all(), name="usage stream")

    def put(self, record: msgspec.Struct) -> None:
        """Hand a record over; with a full queue it is lost."""
        try:
            self._queue.put_nowait(self._encoder.encode(record))
        except asyncio.QueueFull:
            self._lost(1)

    async def close(self) -> None:
        """Send what is queued, within a second; idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await self._queue.join()
        await cancel_and_wait(task)
        if not self._queue.empty():
            self._lost(self._queue.qsize())
        with contextlib.suppress(*_PASS_ON):
            await self._client.aclose()
            await self._client.connection_pool.disconnect()

    async def _send_all(self) -> None:
        while True:
            record = await self._queue.get()
            try:
                while True:
                    if await self._sent(record):
                        break
                    await asyncio.sleep(RETRY_S)
            except asyncio.CancelledError:
                self._lost(1)
                raise
            finally:
                self._queue.task_done()

    async def _sent(self, record: bytes) -> bool:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._client.xadd(
                    self._key, {"record": record}, maxlen=self._max_entries, approximate=True
                )
        except _PASS_ON as error:
            now = time.monotonic()
            if now - self._warned_s >= WARN_EVERY_S:
                self._warned_s = now
                log.warning("usage records wait for Redis: %s", error or "no answer in time")
            return False
        return True
