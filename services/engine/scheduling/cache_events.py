"""`CacheEvents`: what became reusable and what was evicted, in order, for the prefix index.

Blocks of history and snapshots of state write to one log: the index applies it in this order.
"""

from services.common.block_hash import BlockHash
from services.engine.contract.messages import (
    BlockKind,
    CacheEvent,
    ClearedBlocks,
    RemovedBlocks,
    StoredBlocks,
)


class CacheEvents:
    """The log since it was drained last; neighbours of one kind are joined."""

    def __init__(self) -> None:
        self._events: list[CacheEvent] = []

    def stored(self, kind: BlockKind, block_hash: BlockHash, parent: BlockHash | None) -> None:
        """Add a block with its parent in the chain, or a snapshot, whose parent is None."""
        last = self._events[-1] if self._events else None
        if (
            isinstance(last, StoredBlocks)
            and last.kind == kind
            and (kind == "state" or last.hashes[-1] == parent)
        ):
            last.hashes.append(block_hash)
        else:
            self._events.append(StoredBlocks(hashes=[block_hash], parent=parent, kind=kind))

    def removed(self, kind: BlockKind, block_hash: BlockHash) -> None:
        """Add an eviction."""
        last = self._events[-1] if self._events else None
        if isinstance(last, RemovedBlocks) and last.kind == kind:
            last.hashes.append(block_hash)
        else:
            self._events.append(RemovedBlocks(hashes=[block_hash], kind=kind))

    def cleared(self) -> None:
        """Record that everything was dropped; what came before does not matter any more."""
        self._events = [ClearedBlocks()]

    def drain(self) -> list[CacheEvent]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events
