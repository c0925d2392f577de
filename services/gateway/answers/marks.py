"""Text up to a mark. The beginning of what may become one is held back, nothing else is."""

from collections.abc import Sequence
from typing import NamedTuple


class Cut(NamedTuple):
    """A buffer, divided: `text` is certain; with a mark, `space` stood between it and the mark."""

    text: str
    space: str
    mark: str | None
    rest: str
    """After the mark; without one, what must be held."""


def cut(buffer: str, marks: Sequence[str]) -> Cut:
    """Divide at the first of some marks, none of which begins another.

    White space is held as well as the beginning of a mark: before a mark it is no text.
    """
    found = [(place, mark) for mark in marks if (place := buffer.find(mark)) >= 0]
    if found:
        place, mark = min(found)
        text = buffer[:place].rstrip()
        return Cut(text, buffer[len(text) : place], mark, buffer[place + len(mark) :])
    text = buffer[: len(buffer) - held(buffer, marks)].rstrip()
    return Cut(text, "", None, buffer[len(text) :])


def held(buffer: str, marks: Sequence[str]) -> int:
    """Length of the longest end of the buffer that begins a mark."""
    longest = max(map(len, marks)) - 1
    for length in range(min(longest, len(buffer)), 0, -1):
        if any(mark.startswith(buffer[-length:]) for mark in marks):
            return length
    return 0


def begins(buffer: str, marks: Sequence[str]) -> str | None:
    """The mark that the buffer begins with; "" if it may still become one, None if it cannot."""
    for mark in marks:
        if buffer.startswith(mark):
            return mark
    return "" if any(mark.startswith(buffer) for mark in marks) else None
