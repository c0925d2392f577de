"""Physical blocks: free list, reference counts, prefix map and LRU of reusable blocks.

A block is free, held (reference count > 0) or cached (count 0, its content findable by hash).
Cached blocks leave in the order in which they lost their last holder. Holders let go of a chain
from its tail, and hold all of a chain up to their last block, so the oldest is always a leaf.
"""

from collections import OrderedDict, deque

from services.common.block_hash import BlockHash
from services.engine.contract.messages import CacheEvent, ClearedBlocks, RemovedBlocks, StoredBlocks


class Blocks:
    """Ids 1 … num_blocks; block 0 is the runner's target of padding and is never handed out."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.version = 0
        """Grows whenever something that did not fit might fit."""
        self._free: deque[int] = deque(range(1, num_blocks + 1))
        self._refs = [0] * (num_blocks + 1)
        self._hash: list[BlockHash | None] = [None] * (num_blocks + 1)
        self._parent: list[BlockHash | None] = [None] * (num_blocks + 1)
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._by_hash: dict[BlockHash, int] = {}
        self._events: list[CacheEvent] = []

    @property
    def num_available(self) -> int:
        """Blocks that can be taken now, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_held(self) -> int:
        """Blocks with a holder."""
        return self.num_blocks - self.num_available

    def num_holders(self, block: int) -> int:
        """Its reference count."""
        return self._refs[block]

    def find(self, block_hash: BlockHash) -> int | None:
        """The block with this content, held or cached."""
        return self._by_hash.get(block_hash)

    def take(self) -> int:
        """A block of undefined content for one holder; evicts the oldest leaf if none is free.

        Raises:
            LookupError: no block is available.
        """
        if self._free:
            block = self._free.popleft()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        else:
            raise LookupError("no block is available")
        self._refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more holder of a held or cached block."""
        if self._refs[block] == 0:
            del self._cached[block]
        self._refs[block] += 1

    def drop(self, block: int) -> None:
        """One holder less; without any the block is cached if its content is known, else free."""
        if self._refs[block] <= 0:
            raise ValueError(f"block {block} has no holder")
        self._refs[block] -= 1
        if self._refs[block]:
            return
        self.version += 1
        if self._hash[block] is None:
            self._free.append(block)
        else:
            self._cached[block] = None

    def register(self, block: int, block_hash: BlockHash, parent: BlockHash | None) -> int:
        """Make a held block's content findable; returns the block that stands for the content.

        That is another one if the content was known already. `parent` is None for a first block.
        """
        known = self._by_hash.setdefault(block_hash, block)
        if known == block and self._hash[block] is None:
            self._hash[block] = block_hash
            self._parent[block] = parent
            self.version += 1
            self._stored(block_hash, parent)
        return known

    def clear(self) -> None:
        """Forget all content; holders keep their blocks."""
        self._free.extend(self._cached)
        self._cached.clear()
        for block in self._by_hash.values():
            self._hash[block] = self._parent[block] = None
        self._by_hash.clear()
        self.version += 1
        self._events = [ClearedBlocks()]

    def drain_events(self) -> list[CacheEvent]:
        """What became reusable or ceased to be since the last call, in order."""
        events, self._events = self._events, []
        return events

    def snapshot(self) -> list[StoredBlocks]:
        """All reusable blocks as chains, parents before children."""
        chains: list[StoredBlocks] = []
        for block_hash, block in self._by_hash.items():
            parent = self._parent[block]
            if chains and parent is not None and chains[-1].hashes[-1] == parent:
                chains[-1].hashes.append(block_hash)
            else:
                chains.append(StoredBlocks(hashes=[block_hash], parent=parent))
        return chains

    def _forget(self, block: int) -> None:
        block_hash = self._hash[block]
        assert block_hash is not None, f"cached block {block} without a hash"
        del self._by_hash[block_hash]
        self._hash[block] = self._parent[block] = None
        last = self._events[-1] if self._events else None
        if isinstance(last, RemovedBlocks):
            last.hashes.append(block_hash)
        else:
            self._events.append(RemovedBlocks(hashes=[block_hash]))

    def _stored(self, block_hash: BlockHash, parent: BlockHash | None) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(last, StoredBlocks) and last.hashes[-1] == parent:
            last.hashes.append(block_hash)
        else:
            self._events.append(StoredBlocks(hashes=[block_hash], parent=parent))

    def check_integrity(self, holders: dict[int, int]) -> None:
        """Compare every count with the holders that exist.

        Raises:
            AssertionError: naming the block at fault.
        """
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert 0 not in free, "block 0 is free"
        assert 0 not in self._cached, "block 0 is cached"
        for block in range(1, self.num_blocks + 1):
            refs, states = self._refs[block], (block in free) + (block in self._cached)
            assert refs == holders.get(block, 0), f"block {block}: {refs} references, {holders}"
            assert states == (refs == 0), f"block {block} is in {states} lists with {refs} holders"
            known = self._hash[block]
            assert known is None or self._by_hash[known] == block, f"block {block}: foreign hash"
            assert (block not in free) or known is None, f"free block {block} has a hash"
            assert (block not in self._cached) or known, f"cached block {block} has no hash"
        assert set(holders) <= set(range(1, self.num_blocks + 1)), "a holder of no real block"
        self._check_chains()

    def _check_chains(self) -> None:
        order = {block: index for index, block in enumerate(self._cached)}
        for block_hash, block in self._by_hash.items():
            assert self._hash[block] == block_hash, f"block {block} is listed under a wrong hash"
            parent_hash = self._parent[block]
            if parent_hash is None:
                continue
            parent = self._by_hash.get(parent_hash)
            assert parent is not None, f"the parent of block {block} was evicted before it"
            if parent in order:
                assert block in order, f"block {block} is held, its parent {parent} is not"
                assert order[block] < order[parent], f"block {block} outlives parent {parent}"
