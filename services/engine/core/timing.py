"""`RoundTimer`: measured rates of this engine, for load reports, retry hints and deadlines."""

from collections.abc import Callable

_WEIGHT = 0.2
_DRAIN_WINDOW_S = 10.0


class RoundTimer:
    """Moving averages over rounds; 0 until the first measurement."""

    def __init__(self, clock: Callable[[], float], sample_tokens: int = 1) -> None:
        """Args:
        clock: seconds.
        sample_tokens: least prompt tokens of a round that counts for the best rate; a smaller
            round mostly measures the time to read the weights.
        """
        self._clock = clock
        self._sample_tokens = sample_tokens
        self.prefill_tokens_per_s = 0.0
        self.best_prefill_tokens_per_s = 0.0
        """The highest recent rate: it rises at once and falls slowly."""
        self.decode_round_s = 0.0
        self._admissions: list[float] = []

    def observe_round(self, prefill_tokens: int, decode_rows: int, seconds: float) -> None:
        """Record a round.

        Args:
            prefill_tokens: prompt tokens computed.
            decode_rows: sequences that computed a single token.
            seconds: the round's time on the device.
        """
        if seconds <= 0:
            return
        if prefill_tokens == 0:
            self.decode_round_s = _blend(self.decode_round_s, seconds)
            return
        # In a mixed round the decodes take their usual time; the rest is the prompts'.
        own = seconds - (self.decode_round_s if decode_rows else 0.0)
        if own <= 0.1 * seconds:
            return
        rate = prefill_tokens / own
        self.prefill_tokens_per_s = _blend(self.prefill_tokens_per_s, rate)
        if prefill_tokens >= self._sample_tokens:
            best = self.best_prefill_tokens_per_s
            self.best_prefill_tokens_per_s = max(rate, _blend(best, rate))

    def observe_admission(self) -> None:
        """Record that a request left the queue."""
        now = self._clock()
        self._admissions.append(now)
        if len(self._admissions) > 256:
            self._admissions = self._admissions[128:]

    @property
    def drain_requests_per_s(self) -> float:
        """Requests admitted per second, over the last 10 seconds."""
        now = self._clock()
        recent = [t for t in self._admissions if now - t <= _DRAIN_WINDOW_S]
        if not recent:
            return 0.0
        return len(recent) / max(now - recent[0], 1.0)


def _blend(old: float, new: float) -> float:
    return new if old == 0.0 else old + _WEIGHT * (new - old)
