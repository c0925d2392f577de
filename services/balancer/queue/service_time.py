"""How long engines work on one request: mean and spread of recent requests."""

import math


class ServiceTime:
    """Seconds that a request spends at an engine: the recent mean, scaled down if less output than
    usual is expected.

    The mean is never scaled up. Answers of one token after a long prompt show nothing about the
    cost of a token, and a request must not be refused because of a guess.
    """

    _KEPT = 0.98
    """Weight of the earlier requests after each new one: about the last 50 requests count."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._squares = 0.0
        self._tokens = 0.0
        self._count = 0.0

    def record_answer(self, seconds: float, expected_output: int) -> None:
        """Record a request that was answered completely after `seconds`."""
        self._seconds = self._seconds * self._KEPT + seconds
        self._squares = self._squares * self._KEPT + seconds * seconds
        self._tokens = self._tokens * self._KEPT + expected_output
        self._count = self._count * self._KEPT + 1.0

    def record_unfinished(self, seconds: float, expected_output: int) -> None:
        """Record a request that ended before its answer; `seconds` is a lower bound of its time.

        Requests that exceed their deadline are never answered. Without them, only the quick
        requests would count.
        """
        if seconds > self.mean_s(expected_output):
            self.record_answer(seconds, expected_output)

    def mean_s(self, expected_output: int) -> float:
        """Mean seconds of a request with that many output tokens; 0 before the first request."""
        return self._scaled(self._mean_s(), expected_output)

    def upper_bound_s(self, expected_output: int) -> float:
        """Seconds that few requests exceed: the mean and two standard deviations."""
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
