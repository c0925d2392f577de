"""A sum whose older parts are forgotten exponentially."""

import math
from collections.abc import Callable


class DecayedSum:
    """Amounts added, each weighed by exp(-age / `tau_s`).

    Args:
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
        """The sum as it stands now."""
        return self._value * math.exp(-max(self._clock() - self._at, 0.0) / self._tau_s)
