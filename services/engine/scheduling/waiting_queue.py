"""Queues of sequences in the policy's order: one sorted list, or one per tenant."""

import bisect
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter

from services.engine.scheduling.policies import in_turn
from services.engine.scheduling.sequence import Sequence

_order = attrgetter("order")


class OrderedSequences:
    """A list sorted by rank. Ranks are unique, so a member is found by bisection."""

    def __init__(self) -> None:
        self._items: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def first(self, count: int) -> list[Sequence]:
        """The first `count` members, as a copy that later changes do not affect."""
        return self._items[:count]

    def after(self, seq: Sequence) -> list[Sequence]:
        """All members that rank behind `seq`."""
        return self._items[bisect.bisect_right(self._items, seq.order, key=_order) :]

    def add(self, seq: Sequence) -> None:
        """Insert a sequence by its rank."""
        bisect.insort(self._items, seq, key=_order)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence.

        Raises:
            LookupError: it is not in the queue.
        """
        index = bisect.bisect_left(self._items, seq.order, key=_order)
        if index == len(self._items) or self._items[index] is not seq:
            raise LookupError(f"sequence {seq.seq_id} is not in the queue")
        del self._items[index]


class WaitingLines:
    """Sequences that wait for admission: in one line, or in one line per tenant."""

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
        """Sequences that are ready, in the order of admission.

        Args:
            counters: positions computed for each tenant.
            ready: whether a sequence can be admitted now.
            cost: positions that a sequence would compute.
        """
        return in_turn(counters, {t: filter(ready, ln) for t, ln in self._lines.items()}, cost)

    def add(self, seq: Sequence) -> None:
        """Insert a sequence by its rank."""
        self._lines.setdefault(self._line_of(seq), OrderedSequences()).add(seq)

    def remove(self, seq: Sequence) -> None:
        """Remove a sequence.

        Raises:
            LookupError: it is not in the queue.
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
