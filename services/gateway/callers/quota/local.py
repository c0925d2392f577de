"""Quotas as one gateway counts them by itself: token buckets that fill over a minute.

While Redis answers they only mirror what it says, so that they are right when it goes away.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.gateway.callers.keys_file import Limits
from services.gateway.callers.quota.verdict import Left, Scope, Verdict

MINUTE_S = 60.0
KEPT = 10_000


@dataclass
class _Bucket:
    level: float
    at_s: float

    def now(self, limit: float, now_s: float) -> float:
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
        """Of each limit that this gateway may give away alone."""

    def admit(
        self, tenant: str, scopes: Sequence[Scope], running: Sequence[int], tokens: int
    ) -> Verdict:
        """Look at all quotas, then take from all or from none.

        Args:
            running: requests that this gateway runs, per scope.
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
            for name, limit in _per_minute(limits):
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
        """Put the real tokens in the place of the reserved ones."""
        for scope in scopes:
            limit = scope.limits.tokens_per_min
            if limit is not None:
                share = max(limit * self.share, 1.0)
                key = (tenant, scope.name, "tokens")
                level = self._level(key, share) + min(reserved, share) - used
                self._set(key, min(level, share))

    def mirror(self, tenant: str, scopes: Sequence[Scope], left: Sequence[Left]) -> None:
        """Take over this gateway's share of what is left of the whole fleet's quotas."""
        for scope, one in zip(scopes, left, strict=False):  # none for a duplicate
            for name, level in (("requests", one.requests), ("tokens", one.tokens)):
                if level is not None:
                    self._set((tenant, scope.name, name), level * self.share)

    def _level(self, key: tuple[str, str, str], limit: float) -> float:
        bucket = self._buckets.get(key)
        return limit if bucket is None else bucket.now(limit, self._clock())

    def _set(self, key: tuple[str, str, str], level: float) -> None:
        self._buckets[key] = _Bucket(level, self._clock())
        self._buckets.move_to_end(key)
        while len(self._buckets) > KEPT:
            self._buckets.popitem(last=False)


def _per_minute(limits: Limits) -> list[tuple[str, int]]:
    both = (("requests", limits.requests_per_min), ("tokens", limits.tokens_per_min))
    return [(name, limit) for name, limit in both if limit is not None]
