"""`BlockManager`: gives blocks to sequences; all-or-nothing, with prefix reuse and copy-on-write.

Owns `Blocks`. Block tables are tuples, so a launched round keeps the table it was planned with. A
shared block is never written: a sequence that must write into one gets a copy first.

Two declarations of a model change what a sequence holds. With a window, blocks wholly before it
leave the table, which has 0 there; their content stays reusable until it is evicted, and a prefix
is usable if the blocks in the window before its end are cached. With fixed-size state, a sequence
also gets a slot (`StateSlots`), together with its blocks or not at all; a prefix is usable up to a
block at whose end there is a snapshot, or, with `StateReplay`, without one.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from services.common.block_hash import BlockHash, hash_block
from services.engine.contract.messages import CacheEvent, StoredBlocks
from services.engine.contract.runner import StateBlock
from services.engine.scheduling.blocks import Blocks
from services.engine.scheduling.cache_events import CacheEvents
from services.engine.scheduling.sequence import Sequence
from services.engine.scheduling.state_slots import Restart, StateSlots
from services.engine.scheduling.window import first_in_window, longest_prefix

__all__ = ["Allocation", "BlockManager", "Blocks"]


class Allocation(NamedTuple):
    """The result of an allocation; the sequence has its table."""

    num_computed: int
    """Leading positions whose keys and values are in the blocks already."""
    copy: tuple[int, int] | None
    """Block to copy before the round, (source, target); the source is held for the copy."""


class _Hit(NamedTuple):
    """The longest usable cached prefix of a sequence."""

    blocks: list[int]
    """Its blocks; 0 for those before the window."""
    restart: Restart = Restart(0)
    """With state: how it comes back at the end of these."""


_MISS = _Hit([])


class BlockManager:
    """Allocates blocks of `block_size` positions. Every method is O(blocks touched)."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_cache: bool = True,
        window: int = 0,
        state: StateBlock | None = None,
        num_states: int = 0,
    ) -> None:
        """Args:
        window: see `RunnerInfo.window`.
        state: see `RunnerInfo.state`; not together with a window (`kv_cache.check_kinds`).
        num_states: slots for sequences and snapshots; at least 1 with `state`.
        """
        self._events = CacheEvents()
        self.states: StateSlots | None = None
        if state is not None:
            self.states = StateSlots(num_states, state, block_size, self._events)
        self.blocks = Blocks(
            num_blocks,
            self._events,
            whole_chains=not window,
            # Without its history, a snapshot cannot be restarted from.
            on_evict=self.states.slots.forget if self.states else lambda block_hash: None,
        )
        self.block_size = block_size
        self.window = window
        self._prefix_cache = prefix_cache

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now."""
        return self.blocks.num_available

    @property
    def num_states(self) -> int:
        """Slots of state, in use or not; 0 for a model without state."""
        return self.states.slots.num_blocks if self.states else 0

    @property
    def version(self) -> int:
        """Changes whenever a sequence that did not fit may fit."""
        return self.blocks.version + (self.states.slots.version if self.states else 0)

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that `num_tokens` positions need."""
        return -(-num_tokens // self.block_size)

    def try_allocate_seq(self, seq: Sequence, headroom: int = 0) -> Allocation | None:
        """Allocate blocks for all known tokens, reusing those of the longest cached prefix.

        Args:
            seq: a sequence without blocks.
            headroom: blocks that must stay available afterwards.

        Returns None, and changes nothing, if there are not enough blocks, or no slot for its state.
        """
        length = len(seq.tokens)
        hit = self._match(seq)
        hits = hit.blocks
        copied = hits[-1] if hits and len(hits) * self.block_size == length else None
        if copied is not None:
            # The last token must be computed again to sample from it, in a block of its own.
            allocation = self._allocate(seq, hits[:-1], copied, length - 1, headroom)
            if allocation is not None:
                return allocation
            hits = self._match(seq, most=len(hits) - 1).blocks
        num_computed = len(hits) * self.block_size - hit.restart.replayed
        return self._allocate(seq, hits, None, num_computed, headroom, hit)

    def shares_prompt(self, parent: Sequence) -> bool:
        """Whether `try_fork_seq` can share the prompt of a sequence that has submitted it.

        Not with state, which has moved on: a fork then restarts from a snapshot, as any other
        sequence does. Nor if the parent has released blocks of the prompt's last window.
        """
        return self.states is None and parent.num_released <= self._first_block(
            parent.num_prompt - 1
        )

    def try_fork_seq(self, seq: Sequence, parent: Sequence, headroom: int = 0) -> Allocation | None:
        """Share the prompt's blocks of another choice, whose prompt must be submitted.

        The last prompt token is computed again, in a copy of its block, to sample from it. Returns
        None, and changes nothing, if there are not enough blocks.
        """
        last = seq.num_prompt - 1
        full = last // self.block_size
        copied = parent.block_table[full] if last % self.block_size else None
        shared = self._shared_by_fork(parent)
        allocation = self._allocate(seq, shared, copied, last, headroom)
        if allocation is not None:
            registered = min(seq.num_registered, parent.num_registered)
            seq.set_registered(max(registered, seq.num_released))
        return allocation

    def num_missing(self, seq: Sequence, parent: Sequence | None, headroom: int) -> int:
        """Blocks that must become available before the sequence fits; 0 or less if it does.

        Args:
            parent: the choice whose computed prompt it would share, if any.
            headroom: blocks that must stay available afterwards.
        """
        if parent is not None:
            shared = self._shared_by_fork(parent)
        else:
            shared = self._match(seq).blocks
            if len(shared) * self.block_size == len(seq.tokens):
                # The last token is computed again, in a block of its own.
                shared = self._match(seq, most=len(shared) - 1).blocks
        held = [block for block in shared if block]
        return self._cost(seq, shared, held) + headroom - self.blocks.num_available

    @property
    def num_missing_states(self) -> int:
        """Slots that must become available before another sequence fits; 0 or less if it does."""
        return 1 - self.states.slots.num_available if self.states else 0

    def count_uncached(self, seqs: Iterable[Sequence]) -> int:
        """Positions still to be computed for these sequences; a shared prefix counts once.

        With state, cached history without a snapshot does not count: by the time a sequence is
        admitted, it may have one.
        """
        count = 0
        seen: set[BlockHash] = set()
        for seq in seqs:
            length, size = len(seq.tokens), self.block_size
            if not self._caches(seq) or seq.wants_prompt_logprobs:
                count += length - seq.num_computed
                continue
            full = length // size
            hashes = self.hashes_of(seq, full)[:full]
            there = [1 if key in seen else self.blocks.find(key) for key in hashes]
            known, passed = -(-seq.num_computed // size), seq.num_released
            if self.window and not known:
                usable = longest_prefix(there, size, self.window, length)
                known, passed = len(usable), usable.count(0)
            seen.update(hashes[passed:])
            unknown = there[known:].count(None)
            count += unknown * size + max(0, length - max(full * size, seq.num_computed))
        return count

    def grow(self, seq: Sequence) -> bool:
        """Append a block to the table; False if none is available."""
        if not self.blocks.num_available:
            return False
        seq.set_blocks((*seq.block_table, self.blocks.take()), self.block_size)
        return True

    def register_computed(self, seq: Sequence, num_computed: int) -> tuple[int, ...]:
        """Make the full blocks among the first `num_computed` positions reusable.

        Call it once those positions are written.

        Returns the blocks that were replaced in the table, because another block with the same
        content was registered before. Rounds in flight may still read them.
        """
        full = num_computed // self.block_size
        if full <= seq.num_registered or not self._caches(seq):
            return ()
        hashes = self.hashes_of(seq, full)
        table = list(seq.block_table)
        replaced: list[int] = []
        for index in range(seq.num_registered, full):
            parent = hashes[index - 1] if index else None
            known = self.blocks.register(table[index], hashes[index], parent)
            if known != table[index]:
                self.blocks.share(known)
                replaced.append(table[index])
                table[index] = known
        seq.set_registered(full)
        if replaced:
            seq.set_blocks(tuple(table), self.block_size)
        return tuple(replaced)

    def release_passed(self, seq: Sequence, num_computed: int) -> None:
        """Release the blocks that neither a later round nor a hit of all full blocks reads.

        Such a hit begins at the end of the last full block, or a position earlier if its prompt
        ends there. Registered content stays reusable until it is evicted.

        Args:
            num_computed: leading positions; all rounds that compute one of them are collected.
        """
        first = self._first_block(num_computed // self.block_size * self.block_size - 1)
        if first > seq.num_released:
            self.drop(reversed(seq.release_blocks(first)))

    def register_snapshot(self, seq: Sequence, end: int, slot: int) -> None:
        """Make a slot the snapshot after the first `end` positions of a sequence.

        Call it once the round that saved it is collected and its history is registered. The slot
        is freed instead if the sequence ended before its tokens up to there were known, if the
        cache does not hold that history, or if it has this snapshot already.
        """
        assert self.states is not None, "a snapshot of a model without state"
        if end <= len(seq.tokens):
            block_hash = self.hashes_of(seq, end // self.block_size)[end // self.block_size - 1]
            if self.blocks.find(block_hash) is not None:
                self.states.register(slot, block_hash, seq, end)
                return
        self.states.slots.drop(slot)

    def wants_snapshot(self, seq: Sequence, end: int) -> bool:
        """Whether the state after the first `end` positions is worth a snapshot."""
        if self.states is None or end % self.states.stride or not self._caches(seq):
            return False
        if self.states.replay:
            return False
        blocks = end // self.block_size
        if end > len(seq.tokens):
            return True  # the last token is in flight, so the content is not known yet
        return self.states.find(self.hashes_of(seq, blocks)[blocks - 1]) is None

    def cut_chunk(self, seq: Sequence, count: int) -> int:
        """Positions of a chunk of at most `count`; see `StateSlots.cut_chunk`."""
        if self.states is None or self.states.replay or not self._caches(seq):
            return count
        return self.states.cut_chunk(seq, count)

    def drop_states(self, slots: Iterable[int]) -> None:
        """Drop one reference of each slot."""
        for slot in slots:
            assert self.states is not None, "a slot of a model without state"
            self.states.slots.drop(slot)

    def drop(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each block; pass the blocks of one chain, its tail first."""
        for block in blocks:
            self.blocks.drop(block)

    def num_sole(self, table: Iterable[int]) -> int:
        """Number of blocks of a table that have one holder."""
        return sum(self.blocks.num_holders(block) == 1 for block in table)

    def hashes_of(self, seq: Sequence, num_blocks: int) -> list[BlockHash]:
        """Hashes of at least the first `num_blocks` full blocks; cached on the sequence."""
        hashes, size = seq.hashes, self.block_size
        while len(hashes) < num_blocks:
            start = len(hashes) * size
            parent = hashes[-1] if hashes else seq.request.root_hash
            hashes.append(hash_block(parent, seq.tokens[start : start + size]))
        return hashes

    def clear(self, holders: Iterable[Sequence]) -> None:
        """Drop all reusable content; the holders keep their blocks and register them again."""
        self.blocks.clear()
        if self.states:
            self.states.slots.clear()
        for seq in holders:
            seq.set_registered(seq.num_released)

    def drain_events(self) -> list[CacheEvent]:
        """Blocks and snapshots stored or evicted since the last call, in order."""
        return self._events.drain()

    def snapshot(self) -> list[StoredBlocks]:
        """All reusable blocks, as chains, then all snapshots."""
        return self.blocks.snapshot() + (self.states.listed() if self.states else [])

    def check_integrity(self, tables: Iterable[Iterable[int]], states: Iterable[int] = ()) -> None:
        """Check that all counts match the given tables and slots; see `Blocks.check_integrity`."""
        self.blocks.check_integrity(Counter(b for table in tables for b in table if b))
        if self.states is None:
            assert not any(states), "a sequence of a model without state has a slot"
            return
        held = Counter([*states, *self.states.held_for_starts()])
        self.states.slots.check_integrity(held)
        for block_hash in self.states.slots.contents():
            known = self.blocks.find(block_hash) is not None
            assert known, f"the history of snapshot {self.states.find(block_hash)} was evicted"

    def _caches(self, seq: Sequence) -> bool:
        return self._prefix_cache and not seq.request.params.cache_bypass

    def _first_block(self, start: int) -> int:
        """The first block that a round which begins at position `start` reads."""
        return first_in_window(start, self.window) // self.block_size

    def _shared_by_fork(self, parent: Sequence) -> list[int]:
        last = parent.num_prompt - 1
        first, full = self._first_block(last), last // self.block_size
        return [0] * first + list(parent.block_table[first:full])

    def _match(self, seq: Sequence, most: int | None = None) -> _Hit:
        """The longest usable cached prefix, of at most `most` blocks."""
        if not self._caches(seq) or seq.wants_prompt_logprobs:
            return _Hit([])
        length = len(seq.tokens)
        hashes = self.hashes_of(seq, length // self.block_size)[:most]
        if self.window:
            found = [self.blocks.find(block_hash) for block_hash in hashes]
            return _Hit(longest_prefix(found, self.block_size, self.window, length))
        hits: list[int] = []
        for block_hash in hashes:
            block = self.blocks.find(block_hash)
            if block is None:
                break
            hits.append(block)
        if self.states is None:
            return _Hit(hits)
        restart = self.states.find_restart(len(hits), hashes, length)
        return _Hit(hits[: restart.num_blocks], restart)

    def _allocate(
        self,
        seq: Sequence,
        shared: list[int],
        copied: int | None,
        num_computed: int,
        headroom: int,
        hit: _Hit = _MISS,
    ) -> Allocation | None:
        states = self.states
        if self.num_missing_states > 0:
            return None
        released = shared.count(0)
        held = shared[released:]
        pinned = held if copied is None else [*held, copied]
        if self._cost(seq, shared, pinned) + headroom > self.blocks.num_available:
            return None
        num_new = self.blocks_for(len(seq.tokens)) - len(shared)
        for block in pinned:
            self.blocks.share(block)
        if states:
            seq.set_state(states.start(hit.restart.snapshot), hit.restart.snapshot_at)
            if hit.restart.replayed and states.replay:
                seq.set_replay(num_computed, hit.restart.replayed, states.replay.look_back)
        new = [self.blocks.take() for _ in range(num_new)]
        num_registered = len(shared) if self._caches(seq) else 0
        seq.allocate((*shared, *new), self.block_size, num_computed, num_registered, released)
        return Allocation(num_computed, None if copied is None else (copied, new[0]))

    def _cost(self, seq: Sequence, shared: list[int], pinned: list[int]) -> int:
        """Blocks that stop being available once the sequence has its table."""
        revived = sum(self.blocks.num_holders(block) == 0 for block in pinned)
        return self.blocks_for(len(seq.tokens)) - len(shared) + revived
