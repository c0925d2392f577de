"""Sequences that wait for admission, in the policy's order."""

import bisect
from collections.abc import Iterator
from operator import attrgetter

from services.engine.sequence import Sequence

_order = attrgetter("order")


class OrderedSequences:
    """A list kept sorted by rank; ranks are unique, so a member is found by bisection."""

    def __init__(self) -> None:
        self._items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def first(self, count: int) -> list[Sequence]:
        """The first ones, as a copy that outlives changes."""
        return self._items[:count]

    def after(self, seq: Sequence) -> list[Sequence]:
        """Those that rank behind it."""
        return self._items[bisect.bisect_right(self._items, seq.order, key=_order) :]

    def add(self, seq: Sequence) -> None:
        """Put it in its place."""
        bisect.insort(self._items, seq, key=_order)

    def remove(self, seq: Sequence) -> None:
        """Take it out.

        Raises:
            LookupError: it is not a member.
        """
        index = bisect.bisect_left(self._items, seq.order, key=_order)
        if index == len(self._items) or self._items[index] is not seq:
            raise LookupError(f"sequence {seq.seq_id} is not in the queue")
        del self._items[index]
