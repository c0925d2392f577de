"""`Blocks`: the physical blocks. Free list, reference counts, prefix map and LRU eviction.

The same class counts blocks of history and slots of state (`state_slots.py`). A block is free, held
(reference count > 0) or cached (count 0, its content found by hash). Cached blocks are evicted in
the order in which they lost their last holder. A holder holds a chain of blocks from the first on
and drops it from the tail, so the oldest cached block is always a leaf; `whole_chains` states the
exceptions.
"""

from collections import OrderedDict, deque
from collections.abc import Callable

from services.common.block_hash import BlockHash
from services.engine.contract.messages import BlockKind, CacheEvent, StoredBlocks
from services.engine.scheduling.cache_events import CacheEvents


class Blocks:
    """Blocks 1 to `num_blocks`; block 0 is the runner's target for padding and never allocated."""

    def __init__(
        self,
        num_blocks: int,
        events: CacheEvents | None = None,
        *,
        kind: BlockKind = "history",
        whole_chains: bool = True,
        on_evict: Callable[[BlockHash], None] = lambda block_hash: None,
    ) -> None:
        """Args:
        events: gets what becomes reusable and what is evicted; None for a log of its own.
        whole_chains: a holder of a block holds the block before it too. Not so for snapshots, and
            for models whose layers all slide: their sequences drop blocks before the window.
        on_evict: called with the content of each evicted block.
        """
        self.num_blocks = num_blocks
        self.version = 0
        """Grows whenever a sequence that did not fit may fit."""
        self._free: deque[int] = deque(range(1, num_blocks + 1))
        self._refs = [0] * (num_blocks + 1)
        self._hash: list[BlockHash | None] = [None] * (num_blocks + 1)
        self._parent: list[BlockHash | None] = [None] * (num_blocks + 1)
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._by_hash: dict[BlockHash, int] = {}
        self._events = events or CacheEvents()
        self._kind = kind
        self._whole_chains = whole_chains
        self._on_evict = on_evict

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated without an eviction."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Blocks with a holder."""
        return self.num_blocks - self.num_available

    def num_holders(self, block: int) -> int:
        """The reference count of a block."""
        return self._refs[block]

    def find(self, block_hash: BlockHash) -> int | None:
        """The held or cached block with this content; None if there is none."""
        return self._by_hash.get(block_hash)

    def content_of(self, block: int) -> BlockHash | None:
        """The hash under which a block is in the prefix map; None if it is not."""
        return self._hash[block]

    def contents(self) -> list[BlockHash]:
        """Hashes of all held or cached content."""
        return list(self._by_hash)

    def take(self) -> int:
        """Allocate a block of undefined content for one holder; evicts the oldest if none is free.

        Raises:
            LookupError: no block is available.
        """
        if self._free:
            block = self._free.popleft()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self._evict(block)
        else:
            raise LookupError("no block is available")
        self._refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a holder to a held or cached block."""
        if self._refs[block] == 0:
            del self._cached[block]
        self._refs[block] += 1

    def drop(self, block: int) -> None:
        """Remove a holder. Without any, the block is cached if it is registered, else free.

        Raises:
            ValueError: the block has no holder.
        """
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
        """Enter a held block in the prefix map.

        Args:
            parent: hash of the block before it; None for the first of a chain.

        Returns the block that is in the map for this content: another one if there was one before.
        """
        known = self._by_hash.setdefault(block_hash, block)
        if known == block and self._hash[block] is None:
            self._hash[block] = block_hash
            self._parent[block] = parent
            self.version += 1
            self._events.stored(self._kind, block_hash, parent)
        return known

    def forget(self, block_hash: BlockHash) -> None:
        """Drop this content from the prefix map, if it is there; a holder keeps the block."""
        block = self._by_hash.get(block_hash)
        if block is None:
            return
        self._evict(block)
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def clear(self) -> None:
        """Empty the prefix map; holders keep their blocks."""
        self._free.extend(self._cached)
        self._cached.clear()
        for block in self._by_hash.values():
            self._hash[block] = self._parent[block] = None
        self._by_hash.clear()
        self.version += 1
        self._events.cleared()

    def drain_events(self) -> list[CacheEvent]:
        """What became reusable or was evicted since the last call, in order."""
        return self._events.drain()

    def snapshot(self) -> list[StoredBlocks]:
        """All reusable blocks as chains, parents before children."""
        chains: list[StoredBlocks] = []
        for block_hash, block in self._by_hash.items():
            parent = self._parent[block]
            if chains and parent is not None and chains[-1].hashes[-1] == parent:
                chains[-1].hashes.append(block_hash)
            else:
                chains.append(StoredBlocks(hashes=[block_hash], parent=parent, kind=self._kind))
        return chains

    def _evict(self, block: int) -> None:
        block_hash = self._hash[block]
        assert block_hash is not None, f"cached block {block} without a hash"
        del self._by_hash[block_hash]
        self._hash[block] = self._parent[block] = None
        self._events.removed(self._kind, block_hash)
        self._on_evict(block_hash)

    def check_integrity(self, holders: dict[int, int]) -> None:
        """Check all counts against the holders that exist.

        Args:
            holders: block → number of tables that hold it.

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
        assert set(holders) <= set(range(1, self.num_blocks + 1)), (
            "a table holds a block that does not exist"
        )
        self._check_chains()

    def _check_chains(self) -> None:
        order = {block: index for index, block in enumerate(self._cached)}
        for block_hash, block in self._by_hash.items():
            assert self._hash[block] == block_hash, f"block {block} is listed under a wrong hash"
            parent_hash = self._parent[block]
            if parent_hash is None or not self._whole_chains:
                continue
            parent = self._by_hash.get(parent_hash)
            assert parent is not None, f"the parent of block {block} was evicted before it"
            if parent in order:
                assert block in order, f"block {block} is held, its parent {parent} is not"
                assert order[block] < order[parent], f"block {block} outlives parent {parent}"
