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
        self._squares = 0.0
        self._tokens = 0.0
        self._count = 0.0

    def served(self, seconds: float, expected_output: int) -> None:
        """One request was answered to its end."""
        self._seconds = self._seconds * self._KEPT + seconds
        self._squares = self._squares * self._KEPT + seconds * seconds
        self._tokens = self._tokens * self._KEPT + expected_output
        self._count = self._count * self._KEPT + 1.0

    def lasted(self, seconds: float, expected_output: int) -> None:
        """One ended before its answer did: it would have taken that long at least.

        What outlasts its deadline is not answered: without this, only the quick ones would count.
        """
        if seconds > self.of(expected_output):
            self.served(seconds, expected_output)

    def of(self, expected_output: int) -> float:
        """What a request is likely to take; 0 before the first."""
        return self._scaled(self._mean_s(), expected_output)

    def surely(self, expected_output: int) -> float:
        """What few requests exceed: two standard deviations more."""
        mean_s = self._mean_s()
        mean_square = self._squares / self._count if self._count else 0.0
        deviation_s = math.sqrt(max(mean_square - mean_s * mean_s, 0.0))
        return self._scaled(mean_s + 2 * deviation_s, expected_output)

    def _mean_s(self) -> float:
        return self._seconds / self._count if self._count else 0.0

    def _scaled(self, seconds: float, expected_output: int) -> float:
        if not self._tokens:
            return seconds
        return seconds * min(expected_output * self._count / self._tokens, 1.0)
