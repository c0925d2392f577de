"""The rate at which requests end. Wait estimates and retry hints are derived from it."""

import math
from collections.abc import Callable

from services.balancer.engines.decayed_sum import DecayedSum

_HALF_LIFE_S = 10.0
_TAU_S = _HALF_LIFE_S / math.log(2)


class DrainRate:
    """Requests ended per second, as an exponentially decayed average.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = clock()
        self._ended = DecayedSum(_TAU_S, clock)

    def record_end(self) -> None:
        """Record that one request has ended."""
        self._ended.add(1.0)

    def per_s(self) -> float:
        """Requests ended per second; 0 before the first end."""
        age_s = self._clock() - self._since
        # A young average covers less than one time constant.
        window_s = _TAU_S * (1.0 - math.exp(-max(age_s, 0.1) / _TAU_S))
        return self._ended.value / window_s
