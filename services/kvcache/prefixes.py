"""How much of a prompt each engine holds, from its blocks' entries as Redis gives them.

Lives of engines are bits here: a block's owners are one integer, and a prompt's prefix ends where
the integers have no bit in common. owners.lua draws an entry: 7 bytes per owner, token and kinds.
"""

from collections.abc import Iterable, Mapping
from itertools import groupby

from services.kvcache.events import HISTORY, STATE

TOKEN_BYTES = 6
_ROW_BYTES = TOKEN_BYTES + 1


class Prefixes:
    """One prompt's answer in the making. Built per match, used once.

    Args:
        names: by token, what to call its life; an empty name is a snapshot under way, not counted.
        needs_state: count a prefix only up to a block whose state the owner holds too.
    """

    def __init__(self, names: Mapping[bytes, bytes], needs_state: bool) -> None:
        self._names = [name for name in names.values() if name]
        live = (token for token, name in names.items() if name)
        self._bits = {token: 1 << i for i, token in enumerate(live)}
        self._needs_state = needs_state
        self._held = (1 << len(self._bits)) - 1
        self._depth = 0
        self._reached: dict[int, int] = {}
        """Owners → the most blocks that all of them were found to hold."""

    @property
    def open(self) -> bool:
        """Whether further blocks could change the answer."""
        return bool(self._held)

    def take(self, entries: Iterable[bytes | None]) -> None:
        """The next blocks' entries, in order; None where there is none."""
        # Blocks of one chain mostly have the same owners: equal neighbours are read once.
        for entry, run in groupby(entries):
            history, state = self._owners(entry) if entry else (0, 0)
            self._held &= history
            if not self._held:
                return
            self._depth += len(list(run))
            counted = self._held & state if self._needs_state else self._held
            if counted:
                self._reached[counted] = self._depth

    def found(self) -> list[tuple[bytes, int]]:
        """Names and blocks of those that hold any."""
        # Depths only grow, so each owner's is that of the last mask it is in.
        left, found = (1 << len(self._names)) - 1, []
        for owners, depth in sorted(self._reached.items(), key=lambda item: -item[1]):
            last = owners & left
            left ^= last
            while last:
                lowest = last & -last
                found.append((self._names[lowest.bit_length() - 1], depth))
                last ^= lowest
        return found

    def _owners(self, entry: bytes) -> tuple[int, int]:
        """Who holds the block's history, and its state too."""
        history = state = 0
        for start in range(0, len(entry), _ROW_BYTES):
            kinds = entry[start + TOKEN_BYTES]
            if kinds & HISTORY:
                bit = self._bits.get(entry[start : start + TOKEN_BYTES], 0)
                history |= bit
                if kinds & STATE:
                    state |= bit
        return history, state
