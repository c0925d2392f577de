"""The scheduler's decisions as pure functions of what they are shown; chosen by name in config."""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")

AGE_TOKENS = 64
"""Under `shortest_prefill`, positions by which a rank improves with each later arrival."""


class Standing(NamedTuple):
    """What a sequence is ranked by, once, when it enters the queue."""

    priority: int
    arrival: int
    choice: int
    prefill: int = 0
    """Positions to be computed before its first token, if nothing is cached."""


Order = Callable[[Standing], tuple[int, ...]]
"""Standing → rank; the lowest goes first. Ranks of different sequences differ."""


def fcfs(standing: Standing) -> tuple[int, ...]:
    """First come, first served."""
    return (standing.arrival, standing.choice)


def by_priority(standing: Standing) -> tuple[int, ...]:
    """The highest priority first; equal ones in the order of arrival."""
    return (-standing.priority, standing.arrival, standing.choice)


def shortest_prefill(standing: Standing) -> tuple[int, ...]:
    """The shortest first, aged: at most prefill / AGE_TOKENS later requests rank before one."""
    aged = standing.prefill + AGE_TOKENS * standing.arrival
    return (aged, standing.arrival, standing.choice)


class Policy(NamedTuple):
    """How the queue is ordered."""

    order: Order
    """Of those that run, and of those that wait in one line."""
    by_tenant: bool = False
    """Whether each tenant has a line of its own and `TenantCounters` says whose turn it is."""
    urgent_preempt: bool = False
    """Whether one that waits takes seat and blocks from running ones of lower priority."""


POLICIES: Mapping[str, Policy] = {
    "fcfs": Policy(fcfs),
    "priority": Policy(by_priority, urgent_preempt=True),
    "shortest_prefill": Policy(shortest_prefill),
    "tenant_fair": Policy(fcfs, by_tenant=True),
}


def in_turn(
    counters: Mapping[str, int], lines: Mapping[str, Iterable[T]], cost: Callable[[T], int]
) -> Iterator[T]:
    """Merge the tenants' lines: always the next of the tenant with the lowest counter.

    What was given out is added to its tenant's counter for the rest of this merge, so that those
    admitted in one round take turns as well. Of equal counters the first line goes first.
    """
    turns = [(counters.get(tenant, 0), place) for place, tenant in enumerate(lines)]
    heapq.heapify(turns)
    left = [iter(line) for line in lines.values()]
    while turns:
        counter, place = turns[0]
        for item in left[place]:
            heapq.heapreplace(turns, (counter + cost(item), place))
            yield item
            break
        else:
            heapq.heappop(turns)


class TenantCounters:
    """Virtual token counters: positions computed for each tenant, as far as they still matter.

    A tenant without open sequences earns nothing: on its return it starts at the lowest counter of
    those that have some, or at its own if that is higher. When nobody is left all start anew.
    While two tenants both wait, the one that is ahead gets no new admission before the other, so
    it gains at most what its running sequences compute.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._open: Counter[str] = Counter()

    def enter(self, tenant: str) -> None:
        """One more sequence of a tenant."""
        if tenant not in self._open:
            self.counts[tenant] = max(self.counts.get(tenant, 0), self._lowest())
        self._open[tenant] += 1

    def charge(self, tenant: str, tokens: int) -> None:
        """Positions were computed for it, repeated ones after a preemption included."""
        if tenant in self._open:
            self.counts[tenant] += tokens

    def leave(self, tenant: str) -> None:
        """One sequence less; counters that say nothing any more are dropped."""
        self._open[tenant] -= 1
        if self._open[tenant]:
            return
        del self._open[tenant]
        low = self._lowest()
        self.counts = {
            name: count
            for name, count in self.counts.items()
            if name in self._open or (self._open and count > low)
        }

    def _lowest(self) -> int:
        return min((self.counts[name] for name in self._open), default=0)


class Victim(NamedTuple):
    """What preempting one sequence would mean."""

    seq_id: int
    priority: int
    lost_tokens: int
    """Positions that would be computed again."""
    freed_blocks: int
    arrival: int


def choose_victim(candidates: Sequence[Victim]) -> int | None:
    """The sequence to preempt: lowest priority, then least work lost per block, then youngest.

    One that frees no block (all are shared) is no help and never chosen.
    """
    useful = [c for c in candidates if c.freed_blocks > 0]
    return min(useful, key=_worth).seq_id if useful else None


def choose_victims(candidates: Sequence[Victim], seats: int, blocks: int) -> list[int]:
    """Sequences to preempt, in the order of `choose_victim`, for so many seats and blocks.

    None at all if everybody together would not do: nobody is preempted in vain.
    """
    chosen: list[Victim] = []
    freed = 0
    for candidate in sorted(candidates, key=_worth):
        if len(chosen) >= seats and freed >= blocks:
            break
        if candidate.freed_blocks > 0 or len(chosen) < seats:
            chosen.append(candidate)
            freed += candidate.freed_blocks
    enough = len(chosen) >= seats and freed >= blocks
    return [victim.seq_id for victim in chosen] if enough else []


def _worth(victim: Victim) -> tuple[int, float, int, int]:
    per_block = victim.lost_tokens / max(victim.freed_blocks, 1)
    return (victim.priority, per_block, -victim.arrival, -victim.seq_id)


class PrefillShare:
    """How a round's prefill budget is given out, first come first served, in two classes.

    A prompt longer than the whole budget leaves up to half of it to shorter ones behind it, so
    that nobody's first token waits for a long prompt of someone else; unused halves are not lost.
    """

    def __init__(self, remaining: Sequence[int], budget: int) -> None:
        """Args: tokens still to be computed by each contender, and the tokens of this round."""
        self.left = budget
        self._long_above = budget
        short_need = sum(n for n in remaining if n <= budget)
        self._long_left = budget - min(short_need, budget // 2)

    def offer(self, remaining: int) -> int:
        """Tokens that one contender may take now."""
        if remaining > self._long_above:
            return min(remaining, self._long_left, self.left)
        return min(remaining, self.left)

    def take(self, remaining: int, taken: int) -> None:
        """It took so many of its `remaining`."""
        self.left -= taken
        if remaining > self._long_above:
            self._long_left -= taken
