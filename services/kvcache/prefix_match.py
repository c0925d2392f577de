"""The longest prefix of a prompt per engine, from the entries of its blocks as Redis returns them.

Owners (lives of engines) are bits here: the owners of a block are one integer, and a prefix ends
where the integers have no bit in common. An entry has 7 bytes per owner, its token and the kinds of
what it holds; owners.lua describes it.
"""

from collections.abc import Iterable, Mapping
from itertools import groupby

from services.kvcache.events import HISTORY, STATE

TOKEN_BYTES = 6
_ROW_BYTES = TOKEN_BYTES + 1


class PrefixMatch:
    """The match of one prompt; made for it and used once.

    Args:
        names: name of each owner by token. An empty name is a snapshot under way, which does not
            count.
        needs_state: count a prefix only up to a block whose state the owner holds too.
    """

    def __init__(self, names: Mapping[bytes, bytes], needs_state: bool) -> None:
        self._names = [name for name in names.values() if name]
        live = (token for token, name in names.items() if name)
        self._bits = {token: 1 << i for i, token in enumerate(live)}
        self._needs_state = needs_state
        self._matching = (1 << len(self._bits)) - 1
        """Owners that hold all blocks so far."""
        self._depth = 0
        self._depths: dict[int, int] = {}
        """Set of owners → the number of blocks that all of them hold."""

    @property
    def open(self) -> bool:
        """Whether further blocks can change the result."""
        return bool(self._matching)

    def add_entries(self, entries: Iterable[bytes | None]) -> None:
        """Add the entries of the next blocks, in order; None for a block without an entry."""
        # Neighbouring blocks mostly have the same owners, so equal neighbours are read once.
        for entry, run in groupby(entries):
            history, state = self._owners_of(entry) if entry else (0, 0)
            self._matching &= history
            if not self._matching:
                return
            self._depth += len(list(run))
            counted = self._matching & state if self._needs_state else self._matching
            if counted:
                self._depths[counted] = self._depth

    def result(self) -> list[tuple[bytes, int]]:
        """Name and number of blocks of each owner that holds at least one."""
        # Depths only grow, so the depth of an owner is that of the last set it is in.
        left, found = (1 << len(self._names)) - 1, []
        for owners, depth in sorted(self._depths.items(), key=lambda item: -item[1]):
            last = owners & left
            left ^= last
            while last:
                lowest = last & -last
                found.append((self._names[lowest.bit_length() - 1], depth))
                last ^= lowest
        return found

    def _owners_of(self, entry: bytes) -> tuple[int, int]:
        """The owners that hold the block's history, and those that hold its state too."""
        history = state = 0
        for start in range(0, len(entry), _ROW_BYTES):
            kinds = entry[start + TOKEN_BYTES]
            if kinds & HISTORY:
                bit = self._bits.get(entry[start : start + TOKEN_BYTES], 0)
                history |= bit
                if kinds & STATE:
                    state |= bit
        return history, state
