"""How fast this engine is, measured: rates for load reports and retry hints."""

from collections.abc import Callable

_WEIGHT = 0.2
_DRAIN_WINDOW_S = 10.0


class RoundTimer:
    """Moving averages over rounds; 0 until the first measurement."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.prefill_tokens_per_s = 0.0
        self.decode_round_s = 0.0
        self._admissions: list[float] = []

    def observe_round(self, prefill_tokens: int, decode_rows: int, seconds: float) -> None:
        """A round of `seconds` computed so many prompt tokens and so many single tokens."""
        if seconds <= 0:
            return
        if prefill_tokens == 0:
            self.decode_round_s = _blend(self.decode_round_s, seconds)
            return
        # A mixed round pays for its decodes first; what is left went into the prompts.
        own = seconds - (self.decode_round_s if decode_rows else 0.0)
        if own > 0.1 * seconds:
            self.prefill_tokens_per_s = _blend(self.prefill_tokens_per_s, prefill_tokens / own)

    def observe_admission(self) -> None:
        """A request left the queue."""
        now = self._clock()
        self._admissions.append(now)
        if len(self._admissions) > 256:
            self._admissions = self._admissions[128:]

    @property
    def drain_requests_per_s(self) -> float:
        """Requests taken out of the queue per second, over the last ten seconds or so."""
        now = self._clock()
        recent = [t for t in self._admissions if now - t <= _DRAIN_WINDOW_S]
        if not recent:
            return 0.0
        return len(recent) / max(now - recent[0], 1.0)


def _blend(old: float, new: float) -> float:
    return new if old == 0.0 else old + _WEIGHT * (new - old)
