"""Scheduling policies as pure functions: order of the queue, preemption victims, prefill shares.

`EngineConfig.policy` chooses a `Policy` by its name in `POLICIES`.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")

AGE_TOKENS = 64
"""Under `shortest_prefill`, positions by which a rank improves with each later arrival."""


class Standing(NamedTuple):
    """What a sequence is ranked by; the rank is computed once, when it enters the queue."""

    priority: int
    arrival: int
    choice: int
    prefill: int = 0
    """Positions to compute before the first token if nothing is cached."""


Order = Callable[[Standing], tuple[int, ...]]
"""Standing → rank; the lowest goes first. Ranks of different sequences differ."""


def fcfs(standing: Standing) -> tuple[int, ...]:
    """Order by arrival."""
    return (standing.arrival, standing.choice)


def by_priority(standing: Standing) -> tuple[int, ...]:
    """The highest priority first; equal priorities in the order of arrival."""
    return (-standing.priority, standing.arrival, standing.choice)


def shortest_prefill(standing: Standing) -> tuple[int, ...]:
    """The shortest prefill first; at most prefill / AGE_TOKENS later requests overtake one."""
    aged = standing.prefill + AGE_TOKENS * standing.arrival
    return (aged, standing.arrival, standing.choice)


class Policy(NamedTuple):
    """How the queue is ordered."""

    order: Order
    """Order of the running sequences, and of the waiting ones of one line."""
    by_tenant: bool = False
    """Whether each tenant has its own line; the lowest of the `TenantCounters` goes first."""
    urgent_preempt: bool = False
    """Whether a waiting sequence preempts running ones of lower priority."""


POLICIES: Mapping[str, Policy] = {
    "fcfs": Policy(fcfs),
    "priority": Policy(by_priority, urgent_preempt=True),
    "shortest_prefill": Policy(shortest_prefill),
    "tenant_fair": Policy(fcfs, by_tenant=True),
}


def in_turn(
    counters: Mapping[str, int], lines: Mapping[str, Iterable[T]], cost: Callable[[T], int]
) -> Iterator[T]:
    """Merge the tenants' lines: each item is the next one of the tenant with the lowest counter.

    The cost of an item is added to its tenant's counter for the rest of this merge, so that tenants
    take turns within one round as well. Of equal counters the first line goes first.
    """
    turns = [(counters.get(tenant, 0), index) for index, tenant in enumerate(lines)]
    heapq.heapify(turns)
    left = [iter(line) for line in lines.values()]
    while turns:
        counter, index = turns[0]
        for item in left[index]:
            heapq.heapreplace(turns, (counter + cost(item), index))
            yield item
            break
        else:
            heapq.heappop(turns)


class TenantCounters:
    """Virtual token counters: positions computed for each tenant.

    A tenant does not save up service while it has no open sequence: when it returns, it starts at
    the lowest counter of the active tenants, or at its own if that is higher. Without any active
    tenant all counters are dropped. While two tenants wait, the one with the higher counter is not
    admitted before the other, so it gains at most what its running sequences compute.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._open: Counter[str] = Counter()

    def enter(self, tenant: str) -> None:
        """Count a new sequence of a tenant."""
        if tenant not in self._open:
            self.counts[tenant] = max(self.counts.get(tenant, 0), self._lowest())
        self._open[tenant] += 1

    def charge(self, tenant: str, tokens: int) -> None:
        """Add computed positions, repeated ones after a preemption included."""
        if tenant in self._open:
            self.counts[tenant] += tokens

    def leave(self, tenant: str) -> None:
        """Count an ended sequence; drop counters that no longer matter."""
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
    """A sequence that may be preempted, and what that would cost and free."""

    seq_id: int
    priority: int
    lost_tokens: int
    """Positions to compute again."""
    freed_blocks: int
    arrival: int


def choose_victim(candidates: Sequence[Victim]) -> int | None:
    """Choose by lowest priority, then least work lost per block, then latest arrival.

    A sequence that frees no block, because all are shared, is never chosen.

    Returns the id of the sequence, or None.
    """
    useful = [c for c in candidates if c.freed_blocks > 0]
    return min(useful, key=_loss).seq_id if useful else None


def choose_victims(candidates: Sequence[Victim], slots: int, blocks: int) -> list[int]:
    """Choose sequences to free that many slots and blocks, in the order of `choose_victim`.

    Returns their ids; none if all candidates together would not free enough.
    """
    chosen: list[Victim] = []
    freed = 0
    for candidate in sorted(candidates, key=_loss):
        if len(chosen) >= slots and freed >= blocks:
            break
        if candidate.freed_blocks > 0 or len(chosen) < slots:
            chosen.append(candidate)
            freed += candidate.freed_blocks
    enough = len(chosen) >= slots and freed >= blocks
    return [victim.seq_id for victim in chosen] if enough else []


def _loss(victim: Victim) -> tuple[int, float, int, int]:
    per_block = victim.lost_tokens / max(victim.freed_blocks, 1)
    return (victim.priority, per_block, -victim.arrival, -victim.seq_id)


class PrefillShare:
    """Divides a round's prefill budget, first come first served, in two classes.

    A prompt longer than the whole budget leaves up to half of it to shorter prompts behind it, so
    that a long prompt does not delay their first tokens. A half that is not needed is not lost.
    """

    def __init__(self, remaining: Sequence[int], budget: int) -> None:
        """Args:
        remaining: tokens that each contender has still to compute.
        budget: tokens of this round.
        """
        self.left = budget
        self._long_above = budget
        short_need = sum(n for n in remaining if n <= budget)
        self._long_left = budget - min(short_need, budget // 2)

    def offer(self, remaining: int) -> int:
        """Most tokens that a contender may take now."""
        if remaining > self._long_above:
            return min(remaining, self._long_left, self.left)
        return min(remaining, self.left)

    def take(self, remaining: int, taken: int) -> None:
        """Record that a contender took `taken` of its `remaining` tokens."""
        self.left -= taken
        if remaining > self._long_above:
            self._long_left -= taken
