"""Quotas counted in Redis by all gateways together: one script per call, bounded in time.

After a failed call no request waits for Redis until a heartbeat in the background has been answered
as quickly as a call must be.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from services.gateway.callers.keys_file import Limits
from services.gateway.callers.quota.verdict import Left, Scope, Verdict

log = logging.getLogger(__name__)

LEASE_S = 5.0
HEARTBEAT_S = 1.0
# While Redis is available a heartbeat may take longer than a call: it renews many leases.
HEARTBEAT_TIMEOUT_S = 1.0
WARN_EVERY_S = 30.0
_LUA = Path(__file__).parent / "lua"
_REDIS_ERRORS = (RedisError, OSError, TimeoutError)

Running = Mapping[tuple[str, Sequence[Scope]], Sequence[str]]
"""Ids of running requests by tenant and scopes."""


class CountsAwayError(Exception):
    """Redis did not answer in time, or refused; the call may or may not have had its effect."""


class SharedCounts:
    """The leases of this gateway's requests, and the token buckets of all gateways.

    Args:
        client: of redis.asyncio.
        gateway: unique name of this process among all gateways.
        prefix: of every key.
        timeout_s: of one call.
    """

    def __init__(self, client: Any, *, gateway: str, prefix: str, timeout_s: float) -> None:
        self._client = client
        self._gateway = gateway
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._scripts = {
            name: client.register_script((_LUA / f"{name}.lua").read_text())
            for name in ("admit", "settle", "renew", "heartbeat")
        }
        self._warned_s = -WARN_EVERY_S
        self.available = False
        self.gateways = 1
        """Live gateways at the last answered heartbeat, this one included."""

    async def admit(
        self, tenant: str, scopes: Sequence[Scope], request_id: str, tokens: int, *, unique: bool
    ) -> Verdict:
        """Admit one request, or return the quota that is used up.

        Raises:
            CountsAwayError: see there.
        """
        arguments: list[Any] = [self._gateway, request_id, LEASE_S, tokens, int(unique)]
        for scope in scopes:
            arguments += _limit_arguments(scope.limits)
        reply = await self._call("admit", self._keys(tenant, scopes), arguments)
        return _parse_verdict(reply, len(scopes))

    async def settle(
        self, tenant: str, scopes: Sequence[Scope], request_id: str, *, reserved: int, used: int
    ) -> None:
        """End a request's leases and charge the tokens that it used.

        Raises:
            CountsAwayError: see there.
        """
        arguments: list[Any] = [self._gateway, request_id]
        for scope in scopes:
            limit = scope.limits.tokens_per_min
            taken = 0 if limit is None else min(reserved, limit)
            arguments += [taken, used, "" if limit is None else limit]
        await self._call("settle", self._keys(tenant, scopes), arguments)

    async def send_heartbeat(self, running: Running) -> None:
        """Renew this gateway's own entry and its leases; find out whether Redis is available."""
        longest_s = max(HEARTBEAT_TIMEOUT_S, self._timeout_s)
        limit_s = longest_s if self.available else self._timeout_s
        try:
            async with asyncio.timeout(longest_s):
                began = time.monotonic()
                heartbeat = self._scripts["heartbeat"]
                alive = await heartbeat([f"{self._prefix}:gateways"], [self._gateway, LEASE_S])
                took_s = time.monotonic() - began
                for (tenant, scopes), ids in running.items():
                    await self._renew(tenant, scopes, ids)
        except _REDIS_ERRORS as error:
            self._mark_away(error)
            return
        self.gateways = max(int(alive), 1)
        if not self.available and took_s <= limit_s:
            self.available = True
            log.info("Redis answers: counting quotas together with all gateways")

    async def close(self) -> None:
        """Remove this gateway's entry and close all connections; idempotent."""
        with contextlib.suppress(*_REDIS_ERRORS):
            if self.available:
                async with asyncio.timeout(self._timeout_s):
                    await self._client.zrem(f"{self._prefix}:gateways", self._gateway)
        self.available = False
        with contextlib.suppress(*_REDIS_ERRORS):
            await self._client.aclose()
            await self._client.connection_pool.disconnect()

    async def _renew(self, tenant: str, scopes: Sequence[Scope], ids: Sequence[str]) -> None:
        keys = self._keys(tenant, scopes)
        for leases in keys[1:-1:2]:
            arguments = [self._gateway, LEASE_S, *ids]
            await self._scripts["renew"]([leases, keys[-1]], arguments)

    async def _call(self, name: str, keys: Sequence[str], arguments: Sequence[Any]) -> Any:
        if not self.available:
            raise CountsAwayError
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._scripts[name](keys, arguments)
        except _REDIS_ERRORS as error:
            self._mark_away(error)
            raise CountsAwayError from error

    def _mark_away(self, error: Exception) -> None:
        was, self.available = self.available, False
        now = time.monotonic()
        if (was or self._warned_s < 0) and now - self._warned_s >= WARN_EVERY_S:
            self._warned_s = now
            reason = str(error) or "timeout"
            log.warning("Redis is away, counting quotas in this gateway alone: %s", reason)

    def _keys(self, tenant: str, scopes: Sequence[Scope]) -> list[str]:
        base = f"{self._prefix}:{{{tenant}}}"
        keys: list[str] = []
        for scope in scopes:
            keys += [f"{base}:{scope.name}:bucket", f"{base}:{scope.name}:leases"]
        return [*keys, f"{base}:owners"]


def _limit_arguments(limits: Limits) -> list[Any]:
    three = (limits.requests_per_min, limits.tokens_per_min, limits.concurrency)
    return ["" if number is None else number for number in three]


def _parse_verdict(reply: Sequence[bytes], num_scopes: int) -> Verdict:
    """Parse the reply of admit.lua."""
    word = reply[0].decode()
    numbers = [float(raw) if raw else None for raw in reply[3 : 3 + 2 * num_scopes]]
    left = [Left(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]
    return Verdict(
        refused=None if word == "ok" else word,
        scope=max(int(reply[1]) - 1, 0),
        wait_s=float(reply[2]),
        left=left,
    )
