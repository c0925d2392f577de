"""A bounded queue that is fair between tenants: it orders requests while all engines are busy.

Between tenants, the least served one is next, by a virtual token counter (Sheng et al., "Fairness
in Serving Large Language Models", OSDI 2024). Tokens are charged as they are produced, because the
cost of an answer is unknown at admission. Within a tenant, higher priority comes first, then
earlier arrival. Between tenants, a priority level counts as a fixed number of tokens less served:
the advantage is one-time, and a tenant that always sends high priority does not get a larger share.

The module is pure: no clock, no I/O, no waiting.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from services.balancer.queue.tenant_counters import TenantCounters

K = TypeVar("K")

PROMPT_TOKEN_WEIGHT = 1.0
OUTPUT_TOKEN_WEIGHT = 2.0
PRIORITY_TOKENS = 4096.0
"""Advantage of one priority level over other tenants, in weighted tokens."""
MAX_LEVELS = 8
"""Levels beyond this, up or down, order only the tenant's own requests."""


@dataclass(frozen=True)
class Waiting(Generic[K]):
    """One queued request; `key` is the caller's own object for it."""

    key: K
    tenant: str
    priority: int
    arrival: int


class Offer(NamedTuple, Generic[K]):
    """Result of `FairQueue.offer`."""

    accepted: bool
    displaced: K | None
    """The request that was removed to make room, or None."""


@dataclass
class FairQueue(Generic[K]):
    """The waiting requests of one queue.

    If the queue is full, a new request first displaces the newest of its tenant's own requests of
    lower priority. Otherwise, if another tenant has at least two more requests in the queue, it
    displaces the newest of the least urgent requests of the tenant with most. So no tenant can shut
    others out by filling the queue, at any priority.
    """

    limit: int
    counters: TenantCounters
    _waiting: dict[K, Waiting[K]] = field(default_factory=dict)
    _by_tenant: dict[str, int] = field(default_factory=dict)
    _arrivals: int = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[K]:
        return iter(self._waiting)

    def offer(self, key: K, tenant: str, priority: int) -> Offer[K]:
        """Add a request, if there is room or it may displace another one.

        Raises:
            ValueError: `key` is in the queue already.
        """
        if key in self._waiting:
            raise ValueError("the request is in the queue already")
        displaced: K | None = None
        if len(self._waiting) >= self.limit:
            victim = self._find_displaced(tenant, priority)
            if victim is None:
                return Offer(False, None)
            displaced = victim.key
            self.remove(victim.key)
        self._arrivals += 1
        self._waiting[key] = Waiting(key, tenant, priority, self._arrivals)
        self._by_tenant[tenant] = self._by_tenant.get(tenant, 0) + 1
        return Offer(True, displaced)

    def ahead_of(self, tenant: str) -> int:
        """Estimated requests that are served before a new one of this tenant, at equal shares."""
        tenants = len(self._by_tenant) + (tenant not in self._by_tenant)
        return min(len(self._waiting), self._by_tenant.get(tenant, 0) * tenants + tenants - 1)

    def remove(self, key: K) -> bool:
        """Remove a request; returns whether it was in the queue."""
        entry = self._waiting.pop(key, None)
        if entry is None:
            return False
        self._by_tenant[entry.tenant] -= 1
        if not self._by_tenant[entry.tenant]:
            del self._by_tenant[entry.tenant]
        return True

    def pop(self) -> K | None:
        """Remove and return the next request; None if the queue is empty."""
        first = self._first()
        if first is None:
            return None
        self.remove(first.key)
        return first.key

    def peek(self) -> K | None:
        """The next request, which stays in the queue; None if it is empty."""
        first = self._first()
        return None if first is None else first.key

    def _first(self) -> Waiting[K] | None:
        if not self._waiting:
            return None
        served = self.counters.served
        first = min(
            self._waiting.values(),
            key=lambda w: (served(w.tenant) - head_start(w.priority), -w.priority, w.arrival),
        )
        return first

    def check_integrity(self) -> None:
        """Check that the counts agree with the requests.

        Raises:
            AssertionError: they do not.
        """
        counted: dict[str, int] = {}
        for entry in self._waiting.values():
            counted[entry.tenant] = counted.get(entry.tenant, 0) + 1
        assert counted == self._by_tenant
        assert len(self._waiting) <= max(self.limit, 0)

    def _find_displaced(self, tenant: str, priority: int) -> Waiting[K] | None:
        own_count = self._by_tenant.get(tenant, 0)
        entries, counts = self._waiting.values(), self._by_tenant
        below = [w for w in entries if w.tenant == tenant and w.priority < priority]
        if below:
            return min(below, key=lambda w: (w.priority, -w.arrival))
        greedy = [w for w in entries if counts[w.tenant] > own_count + 1]
        return max(greedy, key=lambda w: (counts[w.tenant], -w.priority, w.arrival), default=None)


def head_start(priority: int) -> float:
    """Advantage of this priority over priority 0, in weighted tokens."""
    return PRIORITY_TOKENS * max(-MAX_LEVELS, min(priority, MAX_LEVELS))
