"""Publishes to the KV-cache service which blocks this engine can reuse, off the critical path.

Batches are numbered within the epoch and kept until acknowledged, in bounded memory. When the log
is full its batches are dropped; the index then sees a gap in the numbers and requests a snapshot.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Protocol

import grpc

from inferfleet_proto.internal.v1 import prefix_index_pb2, prefix_index_pb2_grpc
from services.common.block_hash import INDEX_HASH_BYTES, BlockHash, join_for_index
from services.common.rpc import Membership, Peer
from services.common.tasks import cancel_and_wait, raise_if_cancelled
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
_SNAPSHOT_TIMEOUT_S = 10.0
_RETRY_S = (0.1, 0.2, 0.5, 1.0, 2.0)
_KINDS = {
    "history": prefix_index_pb2.BLOCK_KIND_HISTORY,
    "state": prefix_index_pb2.BLOCK_KIND_STATE,
}


class KvEventSink(Protocol):
    """Takes the changes of the block cache from the core's reports."""

    def add_report(self, report: RoundReport) -> None:
        """Queue the report's events or its snapshot; returns at once."""


class NoKvEvents:
    """The sink of an engine without a KV-cache service."""

    def add_report(self, report: RoundReport) -> None:
        """Drop the events."""


class KvEventLog:
    """The numbered batches that are not acknowledged yet; no I/O."""

    def __init__(self, engine_id: str, epoch_ms: int, max_batches: int = MAX_BATCHES) -> None:
        self.num_dropped = 0
        self._engine_id = engine_id
        self._epoch_ms = epoch_ms
        self._max_batches = max_batches
        self._sequence = 0
        self._unacked: deque[Batch] = deque()
        # The first batch of an epoch clears the blocks of an earlier process with this engine id.
        self.append([ClearedBlocks()])

    @property
    def num_unacknowledged(self) -> int:
        """Batches that are queued, or sent and not acknowledged."""
        return len(self._unacked)

    @property
    def last_sequence(self) -> int:
        """The number of the newest batch."""
        return self._sequence

    def append(self, events: Iterable[CacheEvent]) -> None:
        """Add a batch; a full log drops all its batches first, which the index sees as a gap."""
        if len(self._unacked) >= self._max_batches:
            self.num_dropped += len(self._unacked)
            self._unacked.clear()
        self._append_numbered(Batch(events=map(_event, events)))

    def replace_with_snapshot(self, chains: Iterable[StoredBlocks]) -> None:
        """Drop the queued batches and add a snapshot, which lists all blocks of the engine."""
        self._unacked.clear()
        parts = list(_parts(chains)) or [[]]
        for index, part in enumerate(parts):
            snapshot = prefix_index_pb2.SnapshotPart(part=index, last=index == len(parts) - 1)
            self._append_numbered(Batch(events=map(_event, part), snapshot=snapshot))

    def acknowledge(self, sequence: int) -> None:
        """Drop the batches up to this number: the index has stored them."""
        while self._unacked and self._unacked[0].sequence <= sequence:
            self._unacked.popleft()

    def batches_after(self, sequence: int) -> list[Batch]:
        """The batches with a higher number, oldest first."""
        return [batch for batch in self._unacked if batch.sequence > sequence]

    def _append_numbered(self, batch: Batch) -> None:
        self._sequence += 1
        batch.engine_id, batch.epoch_ms = self._engine_id, self._epoch_ms
        batch.sequence = self._sequence
        self._unacked.append(batch)


class KvEventPublisher:
    """Keeps a Publish stream to the KV-cache service open and sends the log over it.

    Args:
        request_snapshot: makes the core list its blocks in one of the next reports.
        heartbeat_s: an idle engine sends an empty batch at this interval, so that an index that
            was emptied sees the gap in the numbers.
    """

    def __init__(
        self,
        address: str,
        membership: Membership,
        events: KvEventLog,
        *,
        request_snapshot: Callable[[], None],
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self.stale = False
        """Whether another process with this engine id started later; nothing is sent then."""
        self._address = address
        self._membership = membership
        self._events = events
        self._request_core_snapshot = request_snapshot
        self._heartbeat_s = heartbeat_s
        self._snapshot_due: float | None = None
        """Loop time at which an awaited snapshot is requested again; None if none is awaited."""
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to publish in the background."""
        self._task = asyncio.create_task(self._run(), name="kv-events")

    async def ended(self) -> None:
        """Return when publishing has ended."""
        if self._task is not None:
            await asyncio.wait({self._task})

    async def stop(self) -> None:
        """End the stream; idempotent."""
        task, self._task = self._task, None
        if task is not None:
            await cancel_and_wait(task)

    def add_report(self, report: RoundReport) -> None:
        """Queue one round's events, or the requested snapshot; returns at once."""
        if self.stale:
            return
        if report.snapshot is not None:
            self._snapshot_due = None
            self._events.replace_with_snapshot(report.snapshot)
        elif report.cache_events and self._snapshot_due is None:
            self._events.append(report.cache_events)
        else:
            return
        self._wake.set()

    async def _run(self) -> None:
        failures = 0
        async with self._membership.channel(self._address) as channel:
            stub = prefix_index_pb2_grpc.PrefixIndexStub(channel)
            while True:
                peer = self._membership.peer(channel, self._address, registered=False)
                connected = await self._publish(stub, peer, quiet=failures > 0)
                raise_if_cancelled()
                if self.stale:
                    return
                failures = 0 if connected else failures + 1
                await asyncio.sleep(_RETRY_S[min(failures, len(_RETRY_S) - 1)])

    async def _publish(
        self, stub: prefix_index_pb2_grpc.PrefixIndexStub, peer: Peer, *, quiet: bool
    ) -> bool:
        """Run one stream to its end; returns whether it got any answer."""
        connected = False
        try:
            answers = stub.Publish(self._batches(), metadata=await peer.metadata())
            async for answer in answers:
                connected = True
                self._handle_answer(answer)
                if self.stale:
                    answers.cancel()
                    return True
        except grpc.aio.AioRpcError as error:
            if connected or not quiet:
                log.warning("the KV-cache service is unavailable: %s", error.details())
        return connected

    async def _batches(self) -> AsyncIterator[Batch]:
        sent = 0
        while True:
            for batch in self._events.batches_after(sent):
                yield batch
                sent = batch.sequence
            self._wake.clear()
            # Checked by content, not by the last number: acknowledged batches are no longer kept.
            if self._events.batches_after(sent):
                continue
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    await self._wake.wait()
            except TimeoutError:
                self._send_heartbeat()

    def _send_heartbeat(self) -> None:
        if self._snapshot_due is None:
            self._events.append(())
        elif asyncio.get_running_loop().time() > self._snapshot_due:
            self._request_snapshot()

    def _handle_answer(self, answer: prefix_index_pb2.PublishResponse) -> None:
        self._events.acknowledge(answer.acked_sequence)
        if answer.stale_epoch:
            self.stale = True
            log.error(
                "another process with this engine_id has started later; this one publishes no "
                "more block events"
            )
        elif answer.need_snapshot and self._snapshot_due is None:
            self._request_snapshot()

    def _request_snapshot(self) -> None:
        self._snapshot_due = asyncio.get_running_loop().time() + _SNAPSHOT_TIMEOUT_S
        self._request_core_snapshot()


def _event(event: CacheEvent) -> prefix_index_pb2.BlockEvent:
    wire = prefix_index_pb2.BlockEvent()
    if isinstance(event, StoredBlocks):
        wire.stored.block_hashes = join_for_index(map(BlockHash, event.hashes))
        wire.stored.parent = (event.parent or b"")[:INDEX_HASH_BYTES]
        wire.stored.kind = _KINDS[event.kind]
    elif isinstance(event, RemovedBlocks):
        wire.removed.block_hashes = join_for_index(map(BlockHash, event.hashes))
        wire.removed.kind = _KINDS[event.kind]
    else:
        wire.cleared.SetInParent()
    return wire


def _parts(chains: Iterable[StoredBlocks]) -> Iterable[list[StoredBlocks]]:
    """Split chains into groups of a bounded number of hashes.

    The second part of a chain that is cut has the last hash of the first part as its parent.
    """
    part: list[StoredBlocks] = []
    room = MAX_HASHES_PER_BATCH
    for chain in chains:
        hashes, parent = chain.hashes, chain.parent
        while hashes:
            taken, hashes = hashes[:room], hashes[room:]
            part.append(StoredBlocks(hashes=taken, parent=parent, kind=chain.kind))
            parent = taken[-1]
            room -= len(taken)
            if not room:
                yield part
                part, room = [], MAX_HASHES_PER_BATCH
    if part:
        yield part
