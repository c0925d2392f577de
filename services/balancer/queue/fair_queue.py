"""Who is next when all engines are busy: a bounded queue that is fair between tenants.

Order between tenants: the one that has been served least, by a virtual counter of tokens (Sheng et
al., "Fairness in Serving Large Language Models", OSDI 2024: charged as tokens are produced, since
the cost of an answer is unknown at admission). Within a tenant: higher priority, then arrival.
Priority counts between tenants too, but only as a bounded head start in tokens: whoever asks for it
always is ahead by that much once, and then served evenly. Pure: no clock, no I/O, no waiting.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K")

PROMPT_TOKEN_WEIGHT = 1.0
OUTPUT_TOKEN_WEIGHT = 2.0
PRIORITY_TOKENS = 4096.0
"""Head start of one level of priority against other tenants, in weighted tokens."""
MAX_LEVELS = 8
"""More levels than this, up or down, order a tenant's own requests only."""


class TenantCounters:
    """Tokens served per tenant, weighted; shared by the queues of all models.

    Only tenants with work (waiting or running) are kept, so memory follows the load, and a tenant
    that comes back after a pause starts level with the least served one: idleness earns no credit.
    """

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._active: dict[str, int] = {}
        self._floor = 0.0

    def enter(self, tenant: str) -> None:
        """One more request of this tenant is waiting or running."""
        if tenant not in self._active:
            if self._served:
                self._floor = max(self._floor, min(self._served.values()))
            self._active[tenant] = 0
            self._served[tenant] = self._floor
        self._active[tenant] += 1

    def leave(self, tenant: str) -> None:
        """One of its requests has ended, in whatever way."""
        self._active[tenant] -= 1
        if not self._active[tenant]:
            del self._active[tenant]
            served = self._served.pop(tenant)
            if not self._served:
                self._floor = max(self._floor, served)

    def charge(self, tenant: str, weighted_tokens: float) -> None:
        """Tokens were served to it; ignored once it has no work left."""
        if tenant in self._served:
            self._served[tenant] += weighted_tokens

    def served(self, tenant: str) -> float:
        """Its counter, to compare with those of others."""
        return self._served.get(tenant, self._floor)

    @property
    def active(self) -> Mapping[str, int]:
        """Requests waiting or running, by tenant."""
        return self._active


@dataclass(frozen=True)
class Waiting(Generic[K]):
    """One queued request; `key` is the caller's."""

    key: K
    tenant: str
    priority: int
    arrival: int


class Offer(NamedTuple, Generic[K]):
    """What became of a request that asked to wait."""

    accepted: bool
    displaced: K | None
    """A request that had to leave to make room, if one had."""


@dataclass
class FairQueue(Generic[K]):
    """The requests of one model that wait for a place.

    When it is full, a tenant displaces the newest of its own of lower priority, or else, if it
    holds fewer places than the greediest tenant, the newest of that one's least urgent: nobody can
    shut others out by filling it, at whatever priority.
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
        """Ask to wait."""
        if key in self._waiting:
            raise ValueError("already waiting")
        displaced: K | None = None
        if len(self._waiting) >= self.limit:
            victim = self._victim(tenant, priority)
            if victim is None:
                return Offer(False, None)
            displaced = victim.key
            self.remove(victim.key)
        self._arrivals += 1
        self._waiting[key] = Waiting(key, tenant, priority, self._arrivals)
        self._by_tenant[tenant] = self._by_tenant.get(tenant, 0) + 1
        return Offer(True, displaced)

    def ahead_of(self, tenant: str) -> int:
        """About how many are served before a newcomer of this tenant, which shares evenly."""
        tenants = len(self._by_tenant) + (tenant not in self._by_tenant)
        return min(len(self._waiting), self._by_tenant.get(tenant, 0) * tenants + tenants - 1)

    def remove(self, key: K) -> bool:
        """It waits no more; whether it did."""
        entry = self._waiting.pop(key, None)
        if entry is None:
            return False
        self._by_tenant[entry.tenant] -= 1
        if not self._by_tenant[entry.tenant]:
            del self._by_tenant[entry.tenant]
        return True

    def pop(self) -> K | None:
        """Take the next one."""
        first = self._first()
        if first is None:
            return None
        self.remove(first.key)
        return first.key

    def peek(self) -> K | None:
        """Who is next."""
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
        """Raise AssertionError if its books do not agree."""
        counted: dict[str, int] = {}
        for entry in self._waiting.values():
            counted[entry.tenant] = counted.get(entry.tenant, 0) + 1
        assert counted == self._by_tenant
        assert len(self._waiting) <= max(self.limit, 0)

    def _victim(self, tenant: str, priority: int) -> Waiting[K] | None:
        mine = self._by_tenant.get(tenant, 0)
        entries, held = self._waiting.values(), self._by_tenant
        below = [w for w in entries if w.tenant == tenant and w.priority < priority]
        if below:
            return min(below, key=lambda w: (w.priority, -w.arrival))
        greedy = [w for w in entries if held[w.tenant] > mine + 1]
        return max(greedy, key=lambda w: (held[w.tenant], -w.priority, w.arrival), default=None)


def head_start(priority: int) -> float:
    """Weighted tokens that a request of this priority is ahead of one of priority 0."""
    return PRIORITY_TOKENS * max(-MAX_LEVELS, min(priority, MAX_LEVELS))
