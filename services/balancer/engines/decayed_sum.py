"""A sum that forgets its older parts exponentially."""

import math
from collections.abc import Callable


class DecayedSum:
    """A sum of amounts, each weighted by exp(-age / `tau_s`).

    Args:
        tau_s: time constant, in seconds.
        clock: monotonic seconds.
    """

    def __init__(self, tau_s: float, clock: Callable[[], float]) -> None:
        self._tau_s = tau_s
        self._clock = clock
        self._value = 0.0
        self._at = clock()

    def add(self, amount: float) -> None:
        """Add an amount now."""
        self._value = self.value + amount
        self._at = self._clock()

    @property
    def value(self) -> float:
        """The sum as of now."""
        return self._value * math.exp(-max(self._clock() - self._at, 0.0) / self._tau_s)
