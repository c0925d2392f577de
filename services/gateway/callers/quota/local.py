"""Quotas counted by one gateway alone: token buckets that fill over a minute.

While Redis answers, the buckets mirror its levels, so that they are right when it goes away.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.gateway.callers.keys_file import Limits
from services.gateway.callers.quota.verdict import Left, Scope, Verdict

MINUTE_S = 60.0
MAX_BUCKETS = 10_000


@dataclass
class _Bucket:
    level: float
    at_s: float

    def level_at(self, limit: float, now_s: float) -> float:
        """The level in requests or tokens; a bucket fills in a minute."""
        return min(limit, self.level + (now_s - self.at_s) * limit / MINUTE_S)


class LocalCounts:
    """Buckets by tenant, scope and quota; owned by the gateway's loop.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: OrderedDict[tuple[str, str, str], _Bucket] = OrderedDict()
        self.share = 1.0
        """The fraction of each limit that this gateway may use up alone."""

    def admit(
        self, tenant: str, scopes: Sequence[Scope], running: Sequence[int], tokens: int
    ) -> Verdict:
        """Check all quotas, then take from all or from none.

        Args:
            running: requests that this gateway runs now, per scope.
            tokens: to reserve.
        """
        left: list[Left] = []
        after: list[Left] = []
        takes: list[tuple[tuple[str, str, str], float]] = []
        refused: tuple[str, int, float] | None = None
        for index, (scope, now_running) in enumerate(zip(scopes, running, strict=True)):
            limits = scope.limits
            most = limits.concurrency
            if most is not None and now_running >= max(1, math.floor(most * self.share)):
                refused = refused or ("concurrency", index, 0.0)
            have: dict[str, float | None] = {"requests": None, "tokens": None}
            then = dict(have)
            for name, limit in _limits_per_minute(limits):
                share = max(limit * self.share, 1.0)
                need = 1.0 if name == "requests" else float(min(max(tokens, 1), share))
                key = (tenant, scope.name, name)
                level = have[name] = self._level(key, share)
                then[name] = level - need
                takes.append((key, level - need))
                if level < need:
                    wait_s = (need - level) * MINUTE_S / share
                    refused = refused or (f"{name}_per_min", index, wait_s)
            left.append(Left(have["requests"], have["tokens"]))
            after.append(Left(then["requests"], then["tokens"]))
        if refused is not None:
            return Verdict(*refused, left)
        for key, level in takes:
            self._set(key, level)
        return Verdict(None, 0, 0.0, after)

    def settle(self, tenant: str, scopes: Sequence[Scope], reserved: int, used: int) -> None:
        """Replace the reserved tokens by those that were used."""
        for scope in scopes:
            limit = scope.limits.tokens_per_min
            if limit is not None:
                share = max(limit * self.share, 1.0)
                key = (tenant, scope.name, "tokens")
                level = self._level(key, share) + min(reserved, share) - used
                self._set(key, min(level, share))

    def mirror(self, tenant: str, scopes: Sequence[Scope], left: Sequence[Left]) -> None:
        """Set the buckets to this gateway's share of what is left fleet-wide."""
        for scope, one in zip(scopes, left, strict=False):  # empty for a duplicate
            for name, level in (("requests", one.requests), ("tokens", one.tokens)):
                if level is not None:
                    self._set((tenant, scope.name, name), level * self.share)

    def _level(self, key: tuple[str, str, str], limit: float) -> float:
        bucket = self._buckets.get(key)
        return limit if bucket is None else bucket.level_at(limit, self._clock())

    def _set(self, key: tuple[str, str, str], level: float) -> None:
        self._buckets[key] = _Bucket(level, self._clock())
        self._buckets.move_to_end(key)
        while len(self._buckets) > MAX_BUCKETS:
            self._buckets.popitem(last=False)


def _limits_per_minute(limits: Limits) -> list[tuple[str, int]]:
    both = (("requests", limits.requests_per_min), ("tokens", limits.tokens_per_min))
    return [(name, limit) for name, limit in both if limit is not None]
