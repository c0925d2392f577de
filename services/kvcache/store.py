"""The connection to Redis: suitable or not, there or away, and every call bounded in time.

When Redis is away, calls fail at once until a probe in the background reaches it again.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError, RedisError, ResponseError

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 1.0
_PROBE_S = {True: 1.0, False: 0.25}
_PROBE_TIMEOUT_S = 0.5
_OLDEST_REDIS = (6, 2)
_LUA = Path(__file__).parent / "lua"
_PASS_ON = (RedisError, OSError, TimeoutError)


class StoreAwayError(Exception):
    """Redis did not answer in time, or refused; what was asked may or may not have been done."""


class UnsuitableStoreError(Exception):
    """This Redis cannot hold the index; the message says why."""


@dataclass(frozen=True)
class StoreSettings:
    """How to reach Redis."""

    url: str
    prefix: str = "if1"
    password: str | None = None
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""


class Store:
    """Runs the index's scripts.

    Calls raise StoreAwayError and nothing else because of Redis.
    """

    def __init__(self, settings: StoreSettings) -> None:
        self.entry_prefix = f"{settings.prefix}:b:"
        self.owners_key, self.live_key, self.meta_key = (
            f"{settings.prefix}:{name}" for name in ("owners", "live", "meta")
        )
        # Typed Any: the client's own annotations leave its generic commands untyped.
        self._client: Any = aioredis.Redis(connection_pool=_pool(settings))
        self._available = False
        self._looked = False
        # After a match timed out nobody waits for another until a probe is answered. Writes go on:
        # they can wait longer, and each one dropped costs a snapshot.
        self._slow = False
        self._unsuitable: str | None = None
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        owners = (_LUA / "owners.lua").read_text()
        self._scripts = {
            name: self._client.register_script(owners + (_LUA / f"{name}.lua").read_text())
            for name in ("apply", "forget", "touch", "sweep")
        }
        self._scripts["match"] = self._client.register_script((_LUA / "match.lua").read_text())

    @property
    def available(self) -> bool:
        """Whether Redis answered when last asked."""
        return self._available

    async def start(self) -> None:
        """Look for Redis once, then keep looking in the background.

        Raises:
            UnsuitableStoreError: it answered, and cannot be used. Redis being away is no error.
        """
        await self._probe()
        if self._unsuitable:
            raise UnsuitableStoreError(self._unsuitable)
        self._task = asyncio.create_task(self._keep_probing(), name="redis probe")

    async def close(self) -> None:
        """Close all connections; idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
        self._available = False
        with contextlib.suppress(*_PASS_ON):
            await self._client.aclose()
            await self._client.connection_pool.disconnect()

    async def match(self, hashes: bytes, needs_state: bool, timeout_s: float) -> list[Any]:
        """Flat list of b"<epoch> <engine id>" and matched blocks."""
        arguments = (hashes, int(needs_state), self.entry_prefix)
        if self._slow:
            raise StoreAwayError("Redis was too slow for a match and has not answered since")
        script = self._scripts["match"]
        reply: list[Any] = await self._bounded(script([self.live_key], arguments), timeout_s)
        return reply

    async def script(self, name: str, arguments: Sequence[Any]) -> Any:
        """Run a script that writes; its keys are owners, live and meta."""
        keys = [self.owners_key, self.live_key, self.meta_key]
        return await self._bounded(self._scripts[name](keys, arguments), CALL_TIMEOUT_S)

    async def owners(self) -> dict[bytes, bytes]:
        """Engine id → raw record, see owners.lua."""
        reply: dict[bytes, bytes] = await self._command("HGETALL", self.owners_key)
        return reply

    async def num_entries(self) -> int:
        """Entries as counted by the scripts; corrected by each sweep."""
        return int(await self._command("HGET", self.meta_key, "entries") or 0)

    async def adjust_entries(self, by: int) -> None:
        """Correct the count for what Redis evicted or expired by itself."""
        await self._command("HINCRBY", self.meta_key, "entries", by)

    async def scan(self, cursor: int, count: int) -> tuple[int, list[bytes]]:
        """Some entries' keys and the next cursor (0: that was the last)."""
        pattern = f"{self.entry_prefix}*"
        reply = await self._command("SCAN", cursor, "MATCH", pattern, "COUNT", count)
        return int(reply[0]), list(reply[1])

    async def _command(self, *words: Any) -> Any:
        return await self._bounded(self._client.execute_command(*words), CALL_TIMEOUT_S)

    async def _bounded(self, call: Any, timeout_s: float) -> Any:
        if not self._available:
            call.close()
            raise StoreAwayError("Redis is away")
        try:
            async with asyncio.timeout(timeout_s):
                return await call
        except ResponseError as error:
            # It is there and says no (full, read-only, not allowed): the next call may succeed.
            raise StoreAwayError(f"Redis refused: {error}") from error
        except _PASS_ON as error:
            if isinstance(error, TimeoutError) and timeout_s < _PROBE_TIMEOUT_S:
                self._slow = True
                self._wake.set()
            else:
                self._lost(error)
            raise StoreAwayError(f"Redis is away: {_reason(error)}") from error

    def _lost(self, error: Exception) -> None:
        if self._available or not self._looked:
            log.warning("Redis is away, going on without it: %s", _reason(error))
            self._wake.set()
        self._available, self._looked = False, True

    async def _keep_probing(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PROBE_S[self._available and not self._slow]):
                    await self._wake.wait()
            self._wake.clear()
            await self._probe()

    async def _probe(self) -> None:
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                if self._available:
                    await self._client.execute_command("PING")
                    self._slow = False
                    return
                unsuitable = await self._examine()
        except _PASS_ON as error:
            self._lost(error)
            return
        if unsuitable and unsuitable != self._unsuitable:
            log.error("%s", unsuitable)
        elif not unsuitable:
            log.info("Redis answers")
        self._unsuitable, self._looked = unsuitable, True
        self._available, self._slow = unsuitable is None, False

    async def _examine(self) -> str | None:
        """What makes this server unfit, or None."""
        try:
            info: dict[str, Any] = await self._client.info()
        except NoPermissionError:
            await self._client.execute_command("PING")
            log.warning("the ACL does not allow INFO: version and mode of Redis are not checked")
            return None
        return unfit(info)


def unfit(info: dict[str, Any]) -> str | None:
    """Why a server with this INFO cannot hold the index, or None; warns of bad eviction."""
    # Valkey 9 says server_mode.
    mode = info.get("redis_mode") or info.get("server_mode", "standalone")
    if mode != "standalone":
        return (
            f"this Redis runs in {mode} mode: one Match reads a whole prompt's keys in one script, "
            "which a Cluster would spread over nodes; give a single primary"
        )
    version = str(info.get("redis_version", "0"))
    if tuple(int(n) for n in re.findall(r"\d+", version)[:2]) < _OLDEST_REDIS:
        return f"Redis {version} is too old: 6.2 or Valkey is needed"
    policy = str(info.get("maxmemory_policy", ""))
    if policy.startswith("allkeys") and info.get("maxmemory"):
        log.warning(
            "Redis may evict the engines' epochs (maxmemory-policy %s): use volatile-lru, or every "
            "eviction of one costs a snapshot",
            policy,
        )
    return None


def _pool(settings: StoreSettings) -> aioredis.ConnectionPool:
    options: dict[str, Any] = {
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": CALL_TIMEOUT_S,
        "socket_connect_timeout": CALL_TIMEOUT_S,
        "max_connections": 64,
        "timeout": CALL_TIMEOUT_S,
        "client_name": "inferfleet-kvcache",
    }
    if settings.password is not None:
        options["password"] = settings.password
    if settings.url.startswith("rediss:"):
        files = {
            "ssl_ca_certs": settings.tls_ca,
            "ssl_certfile": settings.tls_cert,
            "ssl_keyfile": settings.tls_key,
        }
        options |= {key: path for key, path in files.items() if path}
    return aioredis.BlockingConnectionPool.from_url(settings.url, **options)


def _reason(error: Exception) -> str:
    return str(error) or "no answer in time"
