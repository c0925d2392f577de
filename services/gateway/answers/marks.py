"""Finds marks in text that arrives in pieces. Only what may become a mark is held back."""

from collections.abc import Sequence
from typing import NamedTuple


class Cut(NamedTuple):
    """A buffer divided at a mark."""

    text: str
    """Certainly plain text."""
    space: str
    """White space between the text and the mark."""
    mark: str | None
    rest: str
    """After the mark; without a mark, the text that must be held back."""


class PrefixMatch(NamedTuple):
    """Whether a buffer begins with a mark."""

    mark: str | None
    """The mark that it begins with."""
    pending: bool
    """The buffer is the beginning of a mark: more text is needed to decide."""


def cut(buffer: str, marks: Sequence[str]) -> Cut:
    """Divide the buffer at the first of the marks, none of which is a prefix of another.

    White space at the end is held back like the beginning of a mark: before a mark it is not text.
    """
    found = [(place, mark) for mark in marks if (place := buffer.find(mark)) >= 0]
    if found:
        place, mark = min(found)
        text = buffer[:place].rstrip()
        return Cut(text, buffer[len(text) : place], mark, buffer[place + len(mark) :])
    text = buffer[: len(buffer) - pending_length(buffer, marks)].rstrip()
    return Cut(text, "", None, buffer[len(text) :])


def pending_length(buffer: str, marks: Sequence[str]) -> int:
    """Length of the longest suffix of the buffer that is the beginning of a mark."""
    longest = max(map(len, marks)) - 1
    for length in range(min(longest, len(buffer)), 0, -1):
        if any(mark.startswith(buffer[-length:]) for mark in marks):
            return length
    return 0


def without_begun_mark(buffer: str, marks: Sequence[str], least: int = 2) -> str:
    """The end of a cut answer without the beginning of a mark and the white space before it.

    Args:
        least: characters of a mark that are more than chance; in text one is not, as in `a < b`.
    """
    length = pending_length(buffer, marks)
    return buffer[:-length].rstrip() if length >= least else buffer


def match_prefix(buffer: str, marks: Sequence[str]) -> PrefixMatch:
    """Compare the start of the buffer with the marks."""
    for mark in marks:
        if buffer.startswith(mark):
            return PrefixMatch(mark, pending=False)
    return PrefixMatch(None, pending=any(mark.startswith(buffer) for mark in marks))
