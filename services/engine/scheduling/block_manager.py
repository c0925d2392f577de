"""`BlockManager`: gives blocks to sequences; all-or-nothing, with prefix reuse and copy-on-write.

Owns `Blocks`. Block tables are tuples, so a launched round keeps the table it was planned with. A
shared block is never written: a sequence that must write into one gets a copy first.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from services.common.block_hash import BlockHash, hash_block
from services.engine.contract.messages import CacheEvent, StoredBlocks
from services.engine.scheduling.blocks import Blocks
from services.engine.scheduling.sequence import Sequence

__all__ = ["Allocation", "BlockManager", "Blocks"]


class Allocation(NamedTuple):
    """The result of an allocation; the sequence has its table."""

    num_computed: int
    """Leading positions whose keys and values are in the blocks already."""
    copy: tuple[int, int] | None
    """Block to copy before the round, (source, target); the source is held for the copy."""


class BlockManager:
    """Allocates blocks of `block_size` positions. Every method is O(blocks touched)."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = True) -> None:
        self.blocks = Blocks(num_blocks)
        self.block_size = block_size
        self._prefix_cache = prefix_cache

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now."""
        return self.blocks.num_available

    @property
    def version(self) -> int:
        """Changes whenever a sequence that did not fit may fit."""
        return self.blocks.version

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks that `num_tokens` positions need."""
        return -(-num_tokens // self.block_size)

    def try_allocate_seq(self, seq: Sequence, headroom: int = 0) -> Allocation | None:
        """Allocate blocks for all known tokens, reusing those of the longest cached prefix.

        Args:
            seq: a sequence without blocks.
            headroom: blocks that must stay available afterwards.

        Returns None, and changes nothing, if there are not enough blocks.
        """
        length = len(seq.tokens)
        hits = self._match(seq)
        copied = hits[-1] if hits and len(hits) * self.block_size == length else None
        if copied is not None:
            # The last token must be computed again to sample from it, in a block of its own.
            allocation = self._allocate(seq, hits[:-1], copied, length - 1, headroom)
            if allocation is not None:
                return allocation
            hits.pop()
        return self._allocate(seq, hits, None, len(hits) * self.block_size, headroom)

    def try_fork_seq(self, seq: Sequence, parent: Sequence, headroom: int = 0) -> Allocation | None:
        """Share the prompt's blocks of another choice, whose prompt must be submitted.

        The last prompt token is computed again, in a copy of its block, to sample from it. Returns
        None, and changes nothing, if there are not enough blocks.
        """
        last = seq.num_prompt - 1
        full = last // self.block_size
        copied = parent.block_table[full] if last % self.block_size else None
        shared = list(parent.block_table[:full])
        allocation = self._allocate(seq, shared, copied, last, headroom)
        if allocation is not None:
            seq.set_registered(min(seq.num_registered, parent.num_registered))
        return allocation

    def num_missing(self, seq: Sequence, parent: Sequence | None, headroom: int) -> int:
        """Blocks that must become available before the sequence fits; 0 or less if it does.

        Args:
            parent: the choice whose computed prompt it would share, if any.
            headroom: blocks that must stay available afterwards.
        """
        if parent is None:
            shared = self._match(seq)
        else:
            shared = list(parent.block_table[: (seq.num_prompt - 1) // self.block_size])
        if len(shared) * self.block_size == len(seq.tokens):
            shared.pop()  # the last token is computed again, in a block of its own
        return self._cost(seq, shared, shared) + headroom - self.blocks.num_available

    def count_uncached(self, seqs: Iterable[Sequence]) -> int:
        """Positions still to be computed for these sequences; a shared prefix counts once."""
        count = 0
        seen: set[BlockHash] = set()
        for seq in seqs:
            length, size = len(seq.tokens), self.block_size
            if not self._caches(seq) or seq.wants_prompt_logprobs:
                count += length - seq.num_computed
                continue
            full = length // size
            unknown = [
                block_hash
                for block_hash in self.hashes_of(seq, full)[-(-seq.num_computed // size) : full]
                if block_hash not in seen and self.blocks.find(block_hash) is None
            ]
            seen.update(unknown)
            count += len(unknown) * size + max(0, length - max(full * size, seq.num_computed))
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
        for seq in holders:
            seq.set_registered(0)

    def drain_events(self) -> list[CacheEvent]:
        """Blocks that became reusable or were evicted since the last call, in order."""
        return self.blocks.drain_events()

    def snapshot(self) -> list[StoredBlocks]:
        """All reusable blocks, as chains."""
        return self.blocks.snapshot()

    def check_integrity(self, tables: Iterable[Iterable[int]]) -> None:
        """Check that all counts match the given tables; see `Blocks.check_integrity`."""
        self.blocks.check_integrity(Counter(block for table in tables for block in table))

    def _caches(self, seq: Sequence) -> bool:
        return self._prefix_cache and not seq.request.params.cache_bypass

    def _match(self, seq: Sequence) -> list[int]:
        """Blocks of the longest cached prefix."""
        hits: list[int] = []
        if not self._caches(seq) or seq.wants_prompt_logprobs:
            return hits
        for block_hash in self.hashes_of(seq, len(seq.tokens) // self.block_size):
            block = self.blocks.find(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def _allocate(
        self,
        seq: Sequence,
        shared: list[int],
        copied: int | None,
        num_computed: int,
        headroom: int,
    ) -> Allocation | None:
        pinned = shared if copied is None else [*shared, copied]
        if self._cost(seq, shared, pinned) + headroom > self.blocks.num_available:
            return None
        num_new = self.blocks_for(len(seq.tokens)) - len(shared)
        for block in pinned:
            self.blocks.share(block)
        new = [self.blocks.take() for _ in range(num_new)]
        num_registered = len(shared) if self._caches(seq) else 0
        seq.allocate((*shared, *new), self.block_size, num_computed, num_registered)
        return Allocation(num_computed, None if copied is None else (copied, new[0]))

    def _cost(self, seq: Sequence, shared: list[int], pinned: list[int]) -> int:
        """Blocks that stop being available once the sequence has its table."""
        revived = sum(self.blocks.num_holders(block) == 0 for block in pinned)
        return self.blocks_for(len(seq.tokens)) - len(shared) + revived
