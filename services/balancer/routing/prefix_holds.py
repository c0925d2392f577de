"""Prefixes of requests that are at an engine now: their blocks are being computed or held there,
though no event of the engine may have told the index yet.
"""

from collections.abc import Callable

from services.common.block_hash import INDEX_HASH_BYTES

EngineLife = tuple[str, int]
"""Engine id and epoch: a restarted engine is another one."""


class PrefixHolds:
    """Counts, per engine, how many running requests hold each block."""

    def __init__(self) -> None:
        self._held: dict[EngineLife, dict[bytes, int]] = {}

    def hold(self, life: EngineLife, chain: bytes) -> Callable[[], None]:
        """A request with these joined block hashes is sent there.

        Returns:
            What ends the hold; idempotent.
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
        """Blocks at the beginning of `chain` that a request there has too.

        A hash stands for all of its prefix and whole chains are held, so that this is a search for
        the last block held and not a walk.
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
        """Whether nothing is held anywhere."""
        return not self._held
