"""The publishers' streams: batches in, acknowledgements and requests for a snapshot out.

A batch that Redis did not take is dropped, never queued: a snapshot makes up for it once Redis is
back. `Publishers.check` compares what was acknowledged with what the store says, so that a store
that was emptied or set back is noticed although its engines are idle.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass

from services.common.errors import InvalidArgumentError
from services.kvcache.events import Batch
from services.kvcache.index import Applied, Owner, PrefixIndex, Status
from services.kvcache.link import StoreAwayError
from services.kvcache.metrics import Metrics

log = logging.getLogger(__name__)

# A publisher that was asked for a snapshot and sent none is asked again after this long.
ASK_AGAIN_S = 5.0
_MAX_ANSWERS = 64


@dataclass(frozen=True)
class Answer:
    """One PublishResponse."""

    acked: int
    need_snapshot: bool = False
    stale: bool = False


class PublisherSession:
    """One open stream of one engine's epoch."""

    def __init__(
        self, index: PrefixIndex, metrics: Metrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.engine_id = ""
        self.epoch_ms = 0
        self.acked = 0
        self.received = 0
        self._index = index
        self._metrics = metrics
        self._clock = clock
        self._behind = False
        self._asked_at: float | None = None
        self._answers: asyncio.Queue[Answer | None] = asyncio.Queue(_MAX_ANSWERS)

    async def run(self, batches: AsyncIterator[Batch]) -> AsyncGenerator[Answer, None]:
        """Answers to the batches, until they end or a newer epoch has written."""
        reading = asyncio.create_task(self._read(batches), name="publish")
        try:
            while (answer := await self._answers.get()) is not None:
                yield answer
                if answer.stale:
                    return
            await reading
        finally:
            reading.cancel()
            await asyncio.wait({reading})

    def compare(self, acked: int, owner: Owner | None) -> None:
        """Look at what the store says; `acked` is this session's state before the store was asked.

        Asks for a snapshot if the store has less than was acknowledged, or lost a batch.
        """
        if not self.engine_id:
            return
        if owner is not None and owner.epoch_ms > self.epoch_ms:
            self._push(Answer(self.acked, stale=True))
            return
        whole = owner is not None and owner.live and owner.epoch_ms == self.epoch_ms
        if acked and not (whole and owner is not None and owner.sequence >= acked):
            self._fall_behind()
        if self._behind:
            self._ask()

    async def _read(self, batches: AsyncIterator[Batch]) -> None:
        try:
            async for batch in batches:
                self._admit(batch)
                answer = await self._take(batch)
                if answer is not None:
                    await self._answers.put(answer)
        finally:
            # The end must be seen even by a reader that is slow: make room for it.
            if self._answers.full():
                self._answers.get_nowait()
            self._answers.put_nowait(None)

    def _admit(self, batch: Batch) -> None:
        if not self.engine_id:
            self.engine_id, self.epoch_ms = batch.engine_id, batch.epoch_ms
        for field in ("engine_id", "epoch_ms"):
            if getattr(batch, field) != getattr(self, field):
                raise InvalidArgumentError.for_field(field, "a stream is of one engine's one epoch")
        self.received = batch.sequence

    async def _take(self, batch: Batch) -> Answer | None:
        began = self._clock()
        try:
            applied = await self._index.apply(batch)
        except StoreAwayError as error:
            log.debug("batch %d of %s dropped: %s", batch.sequence, self.engine_id, error)
            self._metrics.dropped.inc()
            self._fall_behind()
            return None
        self._metrics.refused.inc(applied.refused_entries)
        if applied.status is Status.STALE:
            self._metrics.stale.inc()
            return Answer(applied.acked, stale=True)
        if applied.status is Status.GAP:
            return self._missed(applied)
        self._metrics.apply_seconds.observe(self._clock() - began)
        return self._stored(batch, applied)

    def _stored(self, batch: Batch, applied: Applied) -> Answer:
        self.acked = applied.acked
        if applied.status is Status.APPLIED:
            self._metrics.batches.inc()
            self._metrics.events.inc(len(batch.operations))
        if batch.last_part and applied.status is Status.APPLIED:
            self._metrics.resyncs.inc()
            log.info("engine %s: snapshot complete at batch %d", self.engine_id, batch.sequence)
        if batch.part is not None or applied.status is Status.APPLIED:
            # Batches follow one another again, or a snapshot is under way.
            self._behind, self._asked_at = False, None
        return Answer(applied.acked)

    def _missed(self, applied: Applied) -> Answer | None:
        self.acked = applied.acked
        self._fall_behind()
        if not self._may_ask():
            return None
        self._asked_at = self._clock()
        return Answer(applied.acked, need_snapshot=True)

    def _fall_behind(self) -> None:
        if not self._behind:
            self._behind = True
            self._metrics.gaps.inc()

    def _may_ask(self) -> bool:
        return self._asked_at is None or self._clock() - self._asked_at >= ASK_AGAIN_S

    def _ask(self) -> None:
        if self._may_ask() and self._push(Answer(self.acked, need_snapshot=True)):
            self._asked_at = self._clock()

    def _push(self, answer: Answer) -> bool:
        with contextlib.suppress(asyncio.QueueFull):
            self._answers.put_nowait(answer)
            return True
        return False


class Publishers:
    """All open streams."""

    def __init__(self, index: PrefixIndex, metrics: Metrics) -> None:
        self._index = index
        self._metrics = metrics
        self._sessions: set[PublisherSession] = set()

    @property
    def engines(self) -> list[str]:
        """Engines with an open stream."""
        return sorted({session.engine_id for session in self._sessions if session.engine_id})

    async def serve(self, batches: AsyncIterator[Batch]) -> AsyncGenerator[Answer, None]:
        """Answer one stream to its end."""
        session = PublisherSession(self._index, self._metrics)
        self._sessions.add(session)
        try:
            async with contextlib.aclosing(session.run(batches)) as answers:
                async for answer in answers:
                    yield answer
        finally:
            self._sessions.discard(session)

    async def check(self) -> Mapping[str, Owner]:
        """Compare every stream with the store; returns what the store says.

        Raises:
            StoreAwayError: nothing could be compared.
        """
        before = {session: session.acked for session in self._sessions}
        lags = [session.received - session.acked for session in before if session.engine_id]
        self._metrics.lag.set(max(lags, default=0))
        self._metrics.publishers.set(len(before))
        owners = await self._index.owners()
        for session, acked in before.items():
            session.compare(acked, owners.get(session.engine_id))
        return owners
