"""Tells the KV-cache service which blocks this engine can reuse; never on the critical path.

Batches are numbered within the epoch and kept until acknowledged, in bounded memory. What does not
fit is dropped and made up for by a snapshot: the index asks for one when it misses a number.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Protocol

import grpc

from inferfleet_proto.internal.v1 import prefix_index_pb2, prefix_index_pb2_grpc
from services.common.block_hash import INDEX_HASH_BYTES
from services.common.rpc import Membership
from services.common.tasks import raise_if_cancelled
from services.engine.contract.messages import (
    CacheEvent,
    ClearedBlocks,
    RemovedBlocks,
    RoundReport,
    StoredBlocks,
)

log = logging.getLogger(__name__)
Batch = prefix_index_pb2.PublishRequest
MAX_BATCHES = 2048
MAX_HASHES_PER_BATCH = 4096
HEARTBEAT_S = 2.0
_SNAPSHOT_PATIENCE_S = 10.0
_RETRY_S = (0.1, 0.2, 0.5, 1.0, 2.0)
_HISTORY = prefix_index_pb2.BLOCK_KIND_HISTORY


class KvEventSink(Protocol):
    """Where the pump puts what a round did to the cache."""

    def add(self, report: RoundReport) -> None:
        """Take the report's events and snapshot; returns at once."""


class NoKvEvents:
    """For an engine without a KV-cache service."""

    def add(self, report: RoundReport) -> None:
        """Nobody wants to know."""


class KvEventLog:
    """Numbered batches that are not acknowledged yet; no I/O."""

    def __init__(self, engine_id: str, epoch_ms: int, max_batches: int = MAX_BATCHES) -> None:
        self.num_dropped = 0
        self._engine_id = engine_id
        self._epoch_ms = epoch_ms
        self._max_batches = max_batches
        self._sequence = 0
        self._unacked: deque[Batch] = deque()
        # The first batch of an epoch clears what an earlier process of this name held.
        self.append([ClearedBlocks()])

    @property
    def num_unacknowledged(self) -> int:
        """Batches that wait, or were sent and not acknowledged."""
        return len(self._unacked)

    @property
    def last_sequence(self) -> int:
        """Number of the newest batch."""
        return self._sequence

    def append(self, events: Iterable[CacheEvent]) -> None:
        """Number a batch; with a full log all is dropped, so that the index misses a number."""
        if len(self._unacked) >= self._max_batches:
            self.num_dropped += len(self._unacked)
            self._unacked.clear()
        self._number(Batch(events=map(_event, events)))

    def replace(self, chains: Iterable[StoredBlocks]) -> None:
        """A snapshot: it says all that the engine holds, so whatever waits is void."""
        self._unacked.clear()
        parts = list(_parts(chains)) or [[]]
        for index, part in enumerate(parts):
            snapshot = prefix_index_pb2.SnapshotPart(part=index, last=index == len(parts) - 1)
            self._number(Batch(events=map(_event, part), snapshot=snapshot))

    def acknowledge(self, sequence: int) -> None:
        """Every batch up to this one is in the store."""
        while self._unacked and self._unacked[0].sequence <= sequence:
            self._unacked.popleft()

    def after(self, sequence: int) -> list[Batch]:
        """The batches that come after this number, oldest first."""
        return [batch for batch in self._unacked if batch.sequence > sequence]

    def _number(self, batch: Batch) -> None:
        self._sequence += 1
        batch.engine_id, batch.epoch_ms = self._engine_id, self._epoch_ms
        batch.sequence = self._sequence
        self._unacked.append(batch)


class KvEventPublisher:
    """Keeps one Publish stream to the KV-cache service open, for ever."""

    def __init__(
        self,
        address: str,
        membership: Membership,
        events: KvEventLog,
        *,
        ask_core: Callable[[], None],
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        """Args:
        ask_core: makes the core list its blocks in a coming report.
        heartbeat_s: an idle engine sends an empty batch this often, so that a store that was
            emptied finds out that it misses something.
        """
        self.stale = False
        self._address = address
        self._membership = membership
        self._events = events
        self._ask_core = ask_core
        self._heartbeat_s = heartbeat_s
        self._snapshot_until: float | None = None
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, in the background."""
        self._task = asyncio.create_task(self._run(), name="kv-events")

    async def ended(self) -> None:
        """Return when nothing will be published any more."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def stop(self) -> None:
        """End the stream; idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    def add(self, report: RoundReport) -> None:
        """Queue one round's events, or the snapshot that was asked for."""
        if self.stale:
            return
        if report.snapshot is not None:
            self._snapshot_until = None
            self._events.replace(report.snapshot)
        elif report.cache_events and self._snapshot_until is None:
            self._events.append(report.cache_events)
        else:
            return
        self._wake.set()

    async def _run(self) -> None:
        failures = 0
        async with self._membership.channel(self._address) as channel:
            stub = prefix_index_pb2_grpc.PrefixIndexStub(channel)
            while True:
                connected = await self._publish(stub, quiet=failures > 0)
                raise_if_cancelled()
                if self.stale:
                    return
                failures = 0 if connected else failures + 1
                await asyncio.sleep(_RETRY_S[min(failures, len(_RETRY_S) - 1)])

    async def _publish(self, stub: prefix_index_pb2_grpc.PrefixIndexStub, *, quiet: bool) -> bool:
        """One stream to its end; whether it was ever answered."""
        connected = False
        try:
            answers = stub.Publish(self._batches(), metadata=self._membership.metadata)
            async for answer in answers:
                connected = True
                self._hear(answer)
                if self.stale:
                    answers.cancel()
                    return True
        except grpc.aio.AioRpcError as error:
            if connected or not quiet:
                log.warning("the KV-cache service is away: %s", error.details())
        return connected

    async def _batches(self) -> AsyncIterator[Batch]:
        sent = 0
        while True:
            for batch in self._events.after(sent):
                yield batch
                sent = batch.sequence
            self._wake.clear()
            # Not by the last number: what an earlier stream had acknowledged is no longer kept.
            if self._events.after(sent):
                continue
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    await self._wake.wait()
            except TimeoutError:
                self._beat()

    def _beat(self) -> None:
        if self._snapshot_until is None:
            self._events.append(())
        elif asyncio.get_running_loop().time() > self._snapshot_until:
            self._want_snapshot()

    def _hear(self, answer: prefix_index_pb2.PublishResponse) -> None:
        self._events.acknowledge(answer.acked_sequence)
        if answer.stale_epoch:
            self.stale = True
            log.error("another process with this engine's id has started later: no more events")
        elif answer.need_snapshot and self._snapshot_until is None:
            self._want_snapshot()

    def _want_snapshot(self) -> None:
        self._snapshot_until = asyncio.get_running_loop().time() + _SNAPSHOT_PATIENCE_S
        self._ask_core()


def _event(event: CacheEvent) -> prefix_index_pb2.BlockEvent:
    wire = prefix_index_pb2.BlockEvent()
    if isinstance(event, StoredBlocks):
        wire.stored.block_hashes = _join(event.hashes)
        wire.stored.parent = (event.parent or b"")[:INDEX_HASH_BYTES]
        wire.stored.kind = _HISTORY
    elif isinstance(event, RemovedBlocks):
        wire.removed.block_hashes = _join(event.hashes)
        wire.removed.kind = _HISTORY
    else:
        wire.cleared.SetInParent()
    return wire


def _join(hashes: Iterable[bytes]) -> bytes:
    return b"".join(block_hash[:INDEX_HASH_BYTES] for block_hash in hashes)


def _parts(chains: Iterable[StoredBlocks]) -> Iterable[list[StoredBlocks]]:
    """Chains in groups of a bounded number of hashes; a long chain is cut and linked by parent."""
    part: list[StoredBlocks] = []
    room = MAX_HASHES_PER_BATCH
    for chain in chains:
        hashes, parent = chain.hashes, chain.parent
        while hashes:
            taken, hashes = hashes[:room], hashes[room:]
            part.append(StoredBlocks(hashes=taken, parent=parent))
            parent = taken[-1]
            room -= len(taken)
            if not room:
                yield part
                part, room = [], MAX_HASHES_PER_BATCH
    if part:
        yield part
