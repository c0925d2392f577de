"""Finds stop strings in text that arrives in pieces.

The match that is complete first wins; of those complete at the same character, the longest. So the
result depends on the text alone, not on how it was cut into pieces.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Checked(NamedTuple):
    """What a piece of text became."""

    text: str
    """May be given out: no part of it can belong to a match any more."""
    matched: str | None = None
    """The stop string that was found; nothing after it counts."""


class StopChecker:
    """Holds back what may still become a stop string."""

    def __init__(self, stop_strings: Sequence[str], *, include: bool = False) -> None:
        """Args:
        stop_strings: none empty.
        include: whether a match belongs to the text.
        """
        self._stops = tuple(dict.fromkeys(stop_strings))
        self._include = include
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    def feed(self, piece: str, *, armed: bool = True) -> Checked:
        """Take the next piece; a match that ends in it counts only if `armed`."""
        if not self._stops or not piece:
            return Checked(piece)
        text = self._held + piece
        match = self._first_match(text) if armed else None
        if match is not None:
            end, stop = match
            self._held = ""
            return Checked(text[:end] if self._include else text[: end - len(stop)], stop)
        held = self._possible_beginning(text)
        self._held = text[len(text) - held :]
        return Checked(text[: len(text) - held])

    def flush(self) -> str:
        """At the end of the output: what was held back after all."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """End and string of the first match that ends in the new part of `text`."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0:
                found = (start + len(stop), -len(stop), stop)
                best = found if best is None else min(best, found)
        return None if best is None else (best[0], best[2])

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest end of `text` with which some stop string begins."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stops):
                return length
        return 0
