"""How fast requests end, and how long one takes: what a client is told to wait comes from here."""

import math
from collections.abc import Callable

_RATE_HALF_LIFE_S = 10.0


class DrainRate:
    """Requests ended per second, with older ones forgotten exponentially."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._weight = 0.0
        self._at = clock()
        self._since = self._at

    def ended(self) -> None:
        """One request has ended."""
        self._weight = self._decayed() + 1.0
        self._at = self._clock()

    def per_s(self) -> float:
        """The rate; 0 before the first end."""
        age_s = self._clock() - self._since
        tau_s = _RATE_HALF_LIFE_S / 0.693
        # A young average has seen less than one time constant.
        window_s = tau_s * (1.0 - math.exp(-max(age_s, 0.1) / tau_s))
        return self._decayed() / window_s

    def _decayed(self) -> float:
        halvings = (self._clock() - self._at) / _RATE_HALF_LIFE_S
        return self._weight * math.pow(0.5, halvings)


class ServiceTime:
    """Seconds that an engine has a request: the mean of late, or less if less output is expected.

    Never more than the mean: answers of one token that waited for a long prompt say nothing of what
    a token costs, and a request must not be refused for what is only guessed.
    """

    _KEPT = 0.98
    """Of what was known, at each new end: about the last 50 count."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0.0
        self._count = 0.0

    def served(self, seconds: float, expected_output: int) -> None:
        """One request was answered to its end."""
        self._seconds = self._seconds * self._KEPT + seconds
        self._tokens = self._tokens * self._KEPT + expected_output
        self._count = self._count * self._KEPT + 1.0

    def of(self, expected_output: int) -> float:
        """What a request is likely to take; 0 before the first."""
        if not self._tokens:
            return 0.0
        mean_s, mean_tokens = self._seconds / self._count, self._tokens / self._count
        return mean_s * min(expected_output / mean_tokens, 1.0)
