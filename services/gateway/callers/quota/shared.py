"""Quotas counted in Redis by all gateways together: one script a call, bounded in time.

After a call that failed nobody waits for Redis again until a beat in the background was answered
as quickly as a call has to be.
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
BEAT_S = 1.0
# While Redis is there a beat may take longer than a call: it renews many leases.
BEAT_TIMEOUT_S = 1.0
WARN_EVERY_S = 30.0
_LUA = Path(__file__).parent / "lua"
_PASS_ON = (RedisError, OSError, TimeoutError)

Running = Mapping[tuple[str, Sequence[Scope]], Sequence[str]]


class CountsAwayError(Exception):
    """Redis did not answer in time, or refused; what was asked may or may not have been done."""


class SharedCounts:
    """Leases of this gateway's requests and everybody's buckets.

    Args:
        client: of redis.asyncio.
        gateway: names this process among all gateways.
        prefix: starts every key.
        timeout_s: of one admission.
    """

    def __init__(self, client: Any, *, gateway: str, prefix: str, timeout_s: float) -> None:
        self._client = client
        self._gateway = gateway
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._scripts = {
            name: client.register_script((_LUA / f"{name}.lua").read_text())
            for name in ("admit", "settle", "renew", "beat")
        }
        self._warned_s = -WARN_EVERY_S
        self.available = False
        self.gateways = 1
        """How many there were when Redis last said so, this one included."""

    async def admit(
        self, tenant: str, scopes: Sequence[Scope], request_id: str, tokens: int, *, unique: bool
    ) -> Verdict:
        """Admit one request, or say which quota forbids it.

        Raises:
            CountsAwayError
        """
        arguments: list[Any] = [self._gateway, request_id, LEASE_S, tokens, int(unique)]
        for scope in scopes:
            arguments += _numbers(scope.limits)
        reply = await self._call("admit", self._keys(tenant, scopes), arguments)
        return _verdict(reply, len(scopes))

    async def settle(
        self, tenant: str, scopes: Sequence[Scope], request_id: str, *, reserved: int, used: int
    ) -> None:
        """End a request's leases and charge its real tokens.

        Raises:
            CountsAwayError
        """
        arguments: list[Any] = [self._gateway, request_id]
        for scope in scopes:
            limit = scope.limits.tokens_per_min
            taken = 0 if limit is None else min(reserved, limit)
            arguments += [taken, used, "" if limit is None else limit]
        await self._call("settle", self._keys(tenant, scopes), arguments)

    async def beat(self, running: Running) -> None:
        """Say that this gateway lives and what it runs; finds out whether Redis is back."""
        longest_s = max(BEAT_TIMEOUT_S, self._timeout_s)
        limit_s = longest_s if self.available else self._timeout_s
        try:
            async with asyncio.timeout(longest_s):
                began = time.monotonic()
                beat = self._scripts["beat"]
                alive = await beat([f"{self._prefix}:gateways"], [self._gateway, LEASE_S])
                took_s = time.monotonic() - began
                for (tenant, scopes), ids in running.items():
                    await self._renew(tenant, scopes, ids)
        except _PASS_ON as error:
            self._lost(error)
            return
        self.gateways = max(int(alive), 1)
        if not self.available and took_s <= limit_s:
            self.available = True
            log.info("Redis answers: quotas are counted with all gateways")

    async def close(self) -> None:
        """Say that this gateway is gone and close all connections; idempotent."""
        with contextlib.suppress(*_PASS_ON):
            if self.available:
                async with asyncio.timeout(self._timeout_s):
                    await self._client.zrem(f"{self._prefix}:gateways", self._gateway)
        self.available = False
        with contextlib.suppress(*_PASS_ON):
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
        except _PASS_ON as error:
            self._lost(error)
            raise CountsAwayError from error

    def _lost(self, error: Exception) -> None:
        was, self.available = self.available, False
        now = time.monotonic()
        if (was or self._warned_s < 0) and now - self._warned_s >= WARN_EVERY_S:
            self._warned_s = now
            reason = str(error) or "no answer in time"
            log.warning("Redis is away, this gateway counts quotas alone: %s", reason)

    def _keys(self, tenant: str, scopes: Sequence[Scope]) -> list[str]:
        base = f"{self._prefix}:{{{tenant}}}"
        keys: list[str] = []
        for scope in scopes:
            keys += [f"{base}:{scope.name}:bucket", f"{base}:{scope.name}:leases"]
        return [*keys, f"{base}:owners"]


def _numbers(limits: Limits) -> list[Any]:
    three = (limits.requests_per_min, limits.tokens_per_min, limits.concurrency)
    return ["" if number is None else number for number in three]


def _verdict(reply: Sequence[bytes], num_scopes: int) -> Verdict:
    word = reply[0].decode()
    numbers = [float(raw) if raw else None for raw in reply[3 : 3 + 2 * num_scopes]]
    left = [Left(*pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]
    return Verdict(
        refused=None if word == "ok" else word,
        scope=max(int(reply[1]) - 1, 0),
        wait_s=float(reply[2]),
        left=left,
    )
