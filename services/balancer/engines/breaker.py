"""A circuit breaker: failures in a row take a peer out for a while, then one try decides.

Time is an input (seconds of any monotonic clock), so the states can be tested without waiting.
"""

from enum import IntEnum

MAX_OPEN_S = 30.0


class BreakerState(IntEnum):
    """As the metric shows it."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """One peer's breaker.

    Args:
        failures: in a row, that open it.
        open_s: how long at first; doubles with every failed try up to MAX_OPEN_S.
    """

    def __init__(self, failures: int = 3, open_s: float = 1.0) -> None:
        self._limit = failures
        self._base_s = open_s
        self._open_s = open_s
        self._in_a_row = 0
        self._until: float | None = None
        self._trying = False

    def state(self, now: float) -> BreakerState:
        """Where it stands at `now`."""
        if self._until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now < self._until else BreakerState.HALF_OPEN

    def admits(self, now: float) -> bool:
        """Whether a request may go to the peer; half open admits one at a time."""
        state = self.state(now)
        return state is BreakerState.CLOSED or (
            state is BreakerState.HALF_OPEN and not self._trying
        )

    def began(self, now: float) -> None:
        """A request goes to the peer."""
        if self.state(now) is BreakerState.HALF_OPEN:
            self._trying = True

    def succeeded(self) -> None:
        """The peer answered."""
        self._in_a_row = 0
        self._until = None
        self._trying = False
        self._open_s = self._base_s

    def failed(self, now: float) -> None:
        """The peer failed in a way that is its own fault."""
        state = self.state(now)
        self._trying = False
        if state is BreakerState.OPEN:
            return  # the streams that broke together count once
        self._in_a_row += 1
        if state is BreakerState.HALF_OPEN:
            self._open_s = min(self._open_s * 2, MAX_OPEN_S)
        elif self._in_a_row < self._limit:
            return
        self._until = now + self._open_s

    def undecided(self) -> None:
        """The request ended without telling anything about the peer (its client left)."""
        self._trying = False
