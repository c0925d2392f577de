"""Prefixes of the requests in flight.

Their engine holds or computes the blocks now, although the prefix index may not have received the
engine's events for them yet.
"""

from collections.abc import Callable

from services.balancer.engines.engine_view import EngineLife
from services.common.block_hash import INDEX_HASH_BYTES


class PrefixHolds:
    """Counts, per engine life, the running requests that hold each block."""

    def __init__(self) -> None:
        self._held: dict[EngineLife, dict[bytes, int]] = {}

    def hold(self, life: EngineLife, chain: bytes) -> Callable[[], None]:
        """Record that a request is sent to the engine.

        Args:
            chain: joined index hashes of the prompt's blocks.

        Returns:
            A function that ends the hold; idempotent.
        """
        blocks = [
            chain[at : at + INDEX_HASH_BYTES] for at in range(0, len(chain), INDEX_HASH_BYTES)
        ]
        held = self._held.setdefault(life, {})
        for block in blocks:
            held[block] = held.get(block, 0) + 1

        def release() -> None:
            for block in blocks:
                held[block] -= 1
                if not held[block]:
                    del held[block]
            blocks.clear()
            if not held and self._held.get(life) is held:
                del self._held[life]

        return release

    def matched(self, life: EngineLife, chain: bytes) -> int:
        """Number of leading blocks of `chain` that a running request at the engine shares.

        A block hash covers the whole prefix before it, and whole chains are held. So a binary
        search for the last held block suffices.
        """
        held = self._held.get(life)
        if not held:
            return 0
        low, high = 0, len(chain) // INDEX_HASH_BYTES
        while low < high:
            middle = (low + high + 1) // 2
            at = (middle - 1) * INDEX_HASH_BYTES
            if chain[at : at + INDEX_HASH_BYTES] in held:
                low = middle
            else:
                high = middle - 1
        return low

    @property
    def empty(self) -> bool:
        """Whether no blocks are held at any engine."""
        return not self._held
