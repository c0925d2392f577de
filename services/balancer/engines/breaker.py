"""A circuit breaker for one peer.

Consecutive failures take the peer out of use for a while; then a single trial request decides
whether it is used again. Time is an argument (seconds of any monotonic clock), so tests of the
states need not wait.
"""

from enum import IntEnum

MAX_OPEN_S = 30.0


class BreakerState(IntEnum):
    """State of a breaker; the number is the value of the metric."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """The breaker of one peer.

    Args:
        failures: consecutive failures that open the breaker.
        open_s: seconds that the breaker stays open at first. The time doubles after each failed
            trial, up to MAX_OPEN_S.
    """

    def __init__(self, failures: int = 3, open_s: float = 1.0) -> None:
        self._limit = failures
        self._base_s = open_s
        self._open_s = open_s
        self._consecutive_failures = 0
        self._open_until: float | None = None
        self._trial_running = False

    @property
    def consecutive_failures(self) -> int:
        """Failures since the last success."""
        return self._consecutive_failures

    def state(self, now: float) -> BreakerState:
        """The state at time `now`."""
        if self._open_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._open_until else BreakerState.HALF_OPEN

    def admits(self, now: float) -> bool:
        """Whether a request may go to the peer. A half-open breaker admits one at a time."""
        state = self.state(now)
        return state is BreakerState.CLOSED or (
            state is BreakerState.HALF_OPEN and not self._trial_running
        )

    def began(self, now: float) -> None:
        """Record that a request is sent to the peer."""
        if self.state(now) is BreakerState.HALF_OPEN:
            self._trial_running = True

    def succeeded(self) -> None:
        """Record that the peer answered."""
        self._consecutive_failures = 0
        self._open_until = None
        self._trial_running = False
        self._open_s = self._base_s

    def failed(self, now: float) -> None:
        """Record a failure that is the peer's own fault."""
        state = self.state(now)
        self._trial_running = False
        if state is BreakerState.OPEN:
            return  # streams that broke together count as one failure
        self._consecutive_failures += 1
        if state is BreakerState.HALF_OPEN:
            self._open_s = min(self._open_s * 2, MAX_OPEN_S)
        elif self._consecutive_failures < self._limit:
            return
        self._open_until = now + self._open_s

    def undecided(self) -> None:
        """Record a request whose end shows nothing about the peer: its client left."""
        self._trial_running = False
