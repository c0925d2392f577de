"""Sequences that wait for admission, in the policy's order."""

import bisect
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter

from services.engine.scheduling.policies import in_turn
from services.engine.scheduling.sequence import Sequence

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


class WaitingLines:
    """Those that wait for admission: in one line, or in one for each tenant."""

    def __init__(self, *, by_tenant: bool = False) -> None:
        self._by_tenant = by_tenant
        self._lines: dict[str, OrderedSequences] = {}

    def __iter__(self) -> Iterator[Sequence]:
        for line in self._lines.values():
            yield from line

    def candidates(
        self,
        counters: Mapping[str, int],
        ready: Callable[[Sequence], bool],
        cost: Callable[[Sequence], int],
    ) -> Iterator[Sequence]:
        """Those that are ready, in the order of admission.

        Args:
            counters: positions computed for each tenant.
            ready: whether one can be admitted at all now.
            cost: positions that one would compute.
        """
        return in_turn(counters, {t: filter(ready, ln) for t, ln in self._lines.items()}, cost)

    def add(self, seq: Sequence) -> None:
        """Put it in its place."""
        self._lines.setdefault(self._line_of(seq), OrderedSequences()).add(seq)

    def remove(self, seq: Sequence) -> None:
        """Take it out.

        Raises:
            LookupError: it is not a member.
        """
        name = self._line_of(seq)
        line = self._lines.get(name)
        if line is None:
            raise LookupError(f"sequence {seq.seq_id} is not in the queue")
        line.remove(seq)
        if not line:
            del self._lines[name]

    def _line_of(self, seq: Sequence) -> str:
        return seq.request.tenant if self._by_tenant else ""
