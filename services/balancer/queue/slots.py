"""Slots promised to requests that are admitted but not yet dispatched.

A request of n choices takes n slots. From its dispatch on, the engine's own count contains it.
"""

from collections.abc import Callable

from services.balancer.engines.engine_view import RoutingRequest
from services.balancer.queue.tenant_counters import TenantCounters
from services.balancer.queue.wait_estimate import WaitEstimate

QueueKey = tuple[str, str]
"""Model, and revision if the request requires one (else empty). Each key has its own queue."""


def queue_key(request: RoutingRequest) -> QueueKey:
    """The queue that the request waits in."""
    return request.model, request.revision


class ReservedSlots:
    """Counts reserved slots by queue."""

    def __init__(self) -> None:
        self._slots: dict[QueueKey, int] = {}

    @property
    def total(self) -> int:
        """All reserved slots."""
        return sum(self._slots.values())

    def reserve(self, request: RoutingRequest) -> None:
        """Reserve the request's slots."""
        key = queue_key(request)
        self._slots[key] = self._slots.get(key, 0) + request.num_choices

    def release(self, request: RoutingRequest) -> None:
        """Return the request's slots."""
        key = queue_key(request)
        self._slots[key] -= request.num_choices
        if not self._slots[key]:
            del self._slots[key]

    def promised(self, request: RoutingRequest) -> int:
        """Slots reserved in all queues that share engines with this request's queue."""
        return sum(
            slots
            for (model, revision), slots in self._slots.items()
            if model == request.model and (not revision or request.revision in ("", revision))
        )


class SlotReservation:
    """The right to dispatch one request, and its tenant's account while it runs.

    The holder must call `use` at the dispatch and `close` at the end of the request. `close` is
    idempotent and right on every exit path.

    Args:
        on_close: called once, when the request has ended.
    """

    def __init__(
        self,
        request: RoutingRequest,
        reserved: ReservedSlots,
        counters: TenantCounters,
        estimate: WaitEstimate,
        *,
        clock: Callable[[], float],
        on_close: Callable[[], None],
    ) -> None:
        self.request = request
        self._reserved = reserved
        self._counters = counters
        self._estimate = estimate
        self._clock = clock
        self._on_close = on_close
        self._used_at: float | None = None
        self._answered = False
        self._closed = False

    def use(self) -> None:
        """Return the reserved slots: the request was dispatched. Later calls do nothing."""
        if self._used_at is None:
            self._used_at = self._clock()
            self._reserved.release(self.request)

    def record_answer(self) -> None:
        """Record a complete answer; its service time counts for the estimates."""
        self._answered = True
        self._estimate.record_answer(self.request, self._seconds_since_use())

    def charge(self, weighted_tokens: float) -> None:
        """Charge the tenant for tokens that were served to it."""
        self._counters.charge(self.request.tenant, weighted_tokens)

    def close(self) -> None:
        """Record that the request has ended."""
        if self._closed:
            return
        self._closed = True
        self.use()
        if not self._answered:
            self._estimate.record_unfinished(self.request, self._seconds_since_use())
        self._counters.leave(self.request.tenant)
        self._estimate.record_end(self.request.model)
        self._on_close()

    def _seconds_since_use(self) -> float:
        return 0.0 if self._used_at is None else self._clock() - self._used_at
