"""The engines' Publish streams: batches in, acknowledgements and requests for a snapshot out.

A batch that cannot be written to Redis is dropped, not queued: a snapshot replaces it once Redis is
available again. `Publishers.check` compares the acknowledged batches with the index, so that a
Redis that was emptied or restored from an old copy is noticed even while its engines are idle.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from inferfleet_proto.internal.v1 import prefix_index_pb2 as pb
from services.common.errors import InvalidArgumentError
from services.common.tasks import cancel_and_wait
from services.kvcache.events import Batch, batch_of
from services.kvcache.index import Applied, Owner, PrefixIndex, Status
from services.kvcache.metrics import KvCacheMetrics
from services.kvcache.redis_connection import RedisUnavailableError

log = logging.getLogger(__name__)

REQUEST_AGAIN_S = 5.0
"""A snapshot that did not come is requested again after this time."""
_MAX_ANSWERS = 64


@dataclass(frozen=True)
class Answer:
    """One PublishResponse."""

    acked: int
    need_snapshot: bool = False
    stale: bool = False


class Publisher(NamedTuple):
    """The engine and the epoch that a stream belongs to."""

    engine_id: str
    epoch_ms: int


class PublisherSession:
    """One open stream.

    Args:
        on_dropped: called after a batch that leaves entries without an owner.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        index: PrefixIndex,
        metrics: KvCacheMetrics,
        on_dropped: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.publisher: Publisher | None = None
        """Known from the first batch on."""
        self.acked = 0
        self.received = 0
        self._index = index
        self._metrics = metrics
        self._on_dropped = on_dropped
        self._clock = clock
        self._behind = False
        self._requested_at: float | None = None
        self._answers: asyncio.Queue[Answer | None] = asyncio.Queue(_MAX_ANSWERS)
        """None: no further answers."""

    async def run(
        self,
        requests: AsyncIterator[pb.PublishRequest],
        send: Callable[[Answer], Awaitable[None]],
    ) -> None:
        """Apply the batches and send the answers, until the stream ends or a newer epoch writes.

        Raises:
            InvalidArgumentError: a request is malformed, or of another engine or epoch.
        """
        reading = asyncio.create_task(self._read(requests), name="publish")
        try:
            while (answer := await self._answers.get()) is not None:
                await send(answer)
                if answer.stale:
                    return
            await reading
        finally:
            await cancel_and_wait(reading)

    def compare(self, acked: int, owner: Owner | None) -> None:
        """Compare the stream with the index, and request a snapshot if the index lacks a batch.

        Args:
            acked: `self.acked` before `owner` was read.
            owner: the engine's record in the index; None if there is none.
        """
        if self.publisher is None:
            return
        epoch_ms = self.publisher.epoch_ms
        if owner is not None and owner.epoch_ms > epoch_ms:
            self._push(Answer(self.acked, stale=True))
            return
        current = owner is not None and owner.live and owner.epoch_ms == epoch_ms
        if acked and not (current and owner is not None and owner.sequence >= acked):
            self._mark_behind()
        if self._behind:
            self._request_snapshot()

    async def _read(self, requests: AsyncIterator[pb.PublishRequest]) -> None:
        try:
            async for request in requests:
                batch = batch_of(request)
                self._admit(batch)
                answer = await self._apply(batch)
                if answer is not None:
                    await self._answers.put(answer)
                if batch.part is not None or batch.clears:
                    self._on_dropped()
        finally:
            # Even a slow reader must get the end, so there must be room for it.
            if self._answers.full():
                self._answers.get_nowait()
            self._answers.put_nowait(None)

    def _admit(self, batch: Batch) -> None:
        if self.publisher is None:
            self.publisher = Publisher(batch.engine_id, batch.epoch_ms)
        for field, expected in self.publisher._asdict().items():
            if getattr(batch, field) != expected:
                raise InvalidArgumentError.for_field(
                    field, f"expected {expected!r}, as in the stream's first request"
                )
        self.received = batch.sequence

    async def _apply(self, batch: Batch) -> Answer | None:
        began = self._clock()
        try:
            applied = await self._index.apply(batch)
        except RedisUnavailableError as error:
            log.debug("batch %d of %s dropped: %s", batch.sequence, batch.engine_id, error)
            self._metrics.dropped.inc()
            self._mark_behind()
            return None
        self._metrics.refused.inc(applied.refused_entries)
        if applied.status is Status.STALE:
            self._metrics.stale.inc()
            return Answer(applied.acked, stale=True)
        if applied.status is Status.GAP:
            return self._answer_gap(applied)
        self._metrics.apply_seconds.observe(self._clock() - began)
        return self._answer_stored(batch, applied)

    def _answer_stored(self, batch: Batch, applied: Applied) -> Answer:
        self.acked = applied.acked
        if applied.status is Status.APPLIED:
            self._metrics.count_applied(batch)
        if batch.last_part and applied.status is Status.APPLIED:
            self._metrics.resyncs.inc()
            log.info("engine %s: snapshot complete at batch %d", batch.engine_id, batch.sequence)
        if batch.part is not None or applied.status is Status.APPLIED:
            # Batches follow one another again, or a snapshot is under way.
            self._behind, self._requested_at = False, None
        return Answer(applied.acked)

    def _answer_gap(self, applied: Applied) -> Answer | None:
        self.acked = applied.acked
        self._mark_behind()
        if not self._may_request():
            return None
        self._requested_at = self._clock()
        return Answer(applied.acked, need_snapshot=True)

    def _mark_behind(self) -> None:
        if not self._behind:
            self._behind = True
            self._metrics.gaps.inc()

    def _may_request(self) -> bool:
        requested_at = self._requested_at
        return requested_at is None or self._clock() - requested_at >= REQUEST_AGAIN_S

    def _request_snapshot(self) -> None:
        if self._may_request() and self._push(Answer(self.acked, need_snapshot=True)):
            self._requested_at = self._clock()

    def _push(self, answer: Answer) -> bool:
        with contextlib.suppress(asyncio.QueueFull):
            self._answers.put_nowait(answer)
            return True
        return False


class Publishers:
    """All open streams.

    Args:
        on_dropped: called after a batch that leaves entries without an owner.
    """

    def __init__(
        self, index: PrefixIndex, metrics: KvCacheMetrics, on_dropped: Callable[[], None]
    ) -> None:
        self._index = index
        self._metrics = metrics
        self._on_dropped = on_dropped
        self._sessions: set[PublisherSession] = set()

    @property
    def engines(self) -> list[str]:
        """Ids of the engines with an open stream."""
        known = (session.publisher for session in self._sessions)
        return sorted({publisher.engine_id for publisher in known if publisher is not None})

    @contextlib.contextmanager
    def open_session(self) -> Iterator[PublisherSession]:
        """A session that is checked until the context ends."""
        session = PublisherSession(self._index, self._metrics, self._on_dropped)
        self._sessions.add(session)
        try:
            yield session
        finally:
            self._sessions.discard(session)

    async def check(self) -> Mapping[str, Owner]:
        """Compare every stream with the index; returns the engines' records in the index.

        Raises:
            RedisUnavailableError: nothing could be compared.
        """
        acked_before = {session: session.acked for session in self._sessions}
        lags = [s.received - s.acked for s in acked_before if s.publisher is not None]
        self._metrics.lag.set(max(lags, default=0))
        self._metrics.publishers.set(len(acked_before))
        owners = await self._index.owners()
        for session, acked in acked_before.items():
            publisher = session.publisher
            session.compare(acked, None if publisher is None else owners.get(publisher.engine_id))
        return owners
