"""Finds stop strings in text that arrives in pieces.

The match that ends first wins; of matches that end at the same character, the longest wins. The
result therefore depends on the text alone, not on how it was cut into pieces.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Checked(NamedTuple):
    """The result of one piece of text."""

    text: str
    """Text that can be sent: no part of it can belong to a later match."""
    matched: str | None = None
    """The stop string that was found; text after it is dropped."""


class StopChecker:
    """Passes text on, except for an end that may still become a stop string.

    Args:
        stop_strings: none of them empty.
        include: whether the stop string itself is part of the text.
    """

    def __init__(self, stop_strings: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(dict.fromkeys(stop_strings))
        self._include = include
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    def feed(self, piece: str, *, armed: bool = True) -> Checked:
        """Check the next piece; a match that ends in it counts only if `armed`."""
        if not self._stops or not piece:
            return Checked(piece)
        text = self._held + piece
        match = self._first_match(text) if armed else None
        if match is not None:
            end, stop = match
            self._held = ""
            return Checked(text[:end] if self._include else text[: end - len(stop)], stop)
        held = self._possible_prefix_length(text)
        self._held = text[len(text) - held :]
        return Checked(text[: len(text) - held])

    def flush(self) -> str:
        """Return the text that was held back, at the end of the output."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """The end position and the stop string of the first match that ends in the new text."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0:
                found = (start + len(stop), -len(stop), stop)
                best = found if best is None else min(best, found)
        return None if best is None else (best[0], best[2])

    def _possible_prefix_length(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a prefix of a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0
