"""`StateSlots`: which slot of fixed-size state is whose, and which snapshots can be restarted from.

A slot is a running sequence's, a snapshot, or free; see `contract.runner.StateBlock`. Snapshots are
found by the hash of the block at whose end they were taken, and evicted, the oldest first, when a
sequence or a newer snapshot needs a slot. A snapshot never changes: a sequence gets a copy, or, if
no other slot is available, the snapshot itself, which nobody else can restart from then.

An answer has one snapshot, its last: a long one would otherwise evict those of all prompts.
"""

import math
from typing import NamedTuple

from services.common.block_hash import BlockHash
from services.engine.contract.messages import StoredBlocks
from services.engine.contract.runner import StateBlock
from services.engine.scheduling.blocks import Blocks
from services.engine.scheduling.cache_events import CacheEvents
from services.engine.scheduling.sequence import Sequence

_ALIGNED_SHARE = 0.75
"""A chunk that the budget cuts ends at a boundary if it keeps at least this share of its tokens."""


class Restart(NamedTuple):
    """Where a sequence restarts in its cached history."""

    num_blocks: int
    """Leading blocks that it reuses."""
    snapshot: int | None = None
    """The snapshot at their end; None without."""
    snapshot_at: int = 0
    """A later boundary to which the cache holds the history but no snapshot; 0 if none."""
    replayed: int = 0
    """Their last positions that are computed again, where the state comes back by a replay."""


class StateSlots:
    """Slots 1 to `num_slots`; owned by the block manager, which allocates them with blocks."""

    def __init__(
        self, num_slots: int, state: StateBlock, block_size: int, events: CacheEvents
    ) -> None:
        self.slots = Blocks(num_slots, events, kind="state", whole_chains=False)
        self.replay = state.replay
        """How a hit rebuilds the state; there are no snapshots then."""
        self._block_size = block_size
        self.stride = math.lcm(state.boundary, block_size)
        """Positions between two snapshots: they are at the end of a block and at a boundary."""
        self._starts: dict[int, int | None] = {}
        """Slots of sequences admitted since the last round → snapshot to restart from, if any."""

    def start(self, snapshot: int | None) -> int:
        """Take a slot for a sequence; it is filled before the sequence's first round.

        Args:
            snapshot: where the sequence restarts; None at position 0. It is held for the copy. If
                it is the only slot that is available, it is the sequence's, and no snapshot.

        Raises:
            LookupError: no slot is available.
        """
        if snapshot is not None:
            alone = self.slots.num_available == 1 and not self.slots.num_holders(snapshot)
            self.slots.share(snapshot)
            if alone:
                content = self.slots.content_of(snapshot)
                assert content is not None, f"slot {snapshot} is no snapshot"
                self.slots.forget(content)
                return snapshot
        slot = self.slots.take()
        self._starts[slot] = snapshot
        return slot

    def cancel_start(self, slot: int) -> None:
        """Forget that a slot is to be filled: its sequence leaves before its first round."""
        snapshot = self._starts.pop(slot, None)
        if snapshot is not None:
            self.slots.drop(snapshot)

    def take_starts(self) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        """Slots to clear, and (snapshot, slot) to copy, before the next round.

        The caller takes over the reference of each snapshot.
        """
        starts, self._starts = self._starts, {}
        clears = tuple(slot for slot, snapshot in starts.items() if snapshot is None)
        copies = tuple((source, slot) for slot, source in starts.items() if source is not None)
        return clears, copies

    def held_for_starts(self) -> list[int]:
        """Snapshots held for copies that no round has taken yet, for the integrity check."""
        return [snapshot for snapshot in self._starts.values() if snapshot is not None]

    def find(self, block_hash: BlockHash) -> int | None:
        """The snapshot at the end of this block; None if there is none."""
        return self.slots.find(block_hash)

    def find_restart(self, cached: int, hashes: list[BlockHash], length: int) -> Restart:
        """Where a sequence of `length` tokens restarts: at the last boundary that will do.

        Args:
            cached: leading blocks that the cache holds.
            hashes: of these blocks at least.
        """
        size = self._block_size
        longest = min(cached * size // self.stride * self.stride, self.last_boundary(length))
        if self.replay:
            return Restart(longest // size, replayed=min(self.replay.positions, longest))
        for end in range(longest, 0, -self.stride):
            snapshot = self.find(hashes[end // size - 1])
            if snapshot is not None:
                return Restart(end // size, snapshot, longest if longest > end else 0)
        return Restart(0, None, longest)

    def take_for_snapshot(self, seq: Sequence, end: int) -> int | None:
        """A slot for a snapshot after `end` positions of a sequence; None if none is available.

        If none is free, the earlier snapshot of the same answer is evicted, else the oldest one.
        """
        earlier = seq.answer_snapshot
        if earlier is not None and end > seq.num_prompt and not self.slots.num_free:
            slot = self.slots.find(earlier)
            if slot is not None and not self.slots.num_holders(slot):
                self.slots.forget(earlier)
        return self.slots.take() if self.slots.num_available else None

    def register(self, slot: int, block_hash: BlockHash, seq: Sequence, end: int) -> None:
        """Make a slot from `take_for_snapshot` a snapshot; one of equal content frees it.

        A new snapshot of an answer replaces the one before it.
        """
        new = self.slots.register(slot, block_hash, None) == slot
        self.slots.drop(slot)
        if new and end > seq.num_prompt:
            if seq.answer_snapshot is not None:
                self.slots.forget(seq.answer_snapshot)
            seq.set_answer_snapshot(block_hash)

    def listed(self) -> list[StoredBlocks]:
        """All snapshots, for the index."""
        hashes = [block_hash for chain in self.slots.snapshot() for block_hash in chain.hashes]
        return [StoredBlocks(hashes=hashes, parent=None, kind="state")] if hashes else []

    def last_boundary(self, length: int) -> int:
        """The last boundary that leaves at least one of `length` positions to compute."""
        return (length - 1) // self.stride * self.stride

    def cut_chunk(self, seq: Sequence, count: int) -> int:
        """Most positions of a chunk of `count` that end where a snapshot is worth taking.

        That is at the last boundary of the known tokens, where a longer prompt with the same
        beginning restarts, and where the cache held more history than snapshots: another prompt
        took another way there, so a third one may. A chunk that the budget cuts anyway ends at a
        boundary if that costs little.
        """
        start, length = seq.num_computed, len(seq.tokens)
        end = start + count
        for mark in (seq.snapshot_at, self.last_boundary(length)):
            if start < mark < end:
                return mark - start
        aligned = end // self.stride * self.stride - start
        if end < length and aligned >= _ALIGNED_SHARE * count:
            return aligned
        return count
