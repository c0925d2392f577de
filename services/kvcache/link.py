"""The link to Redis: which server is the primary now, is it there, and every call bounded in time.

When Redis is away, calls fail at once until a probe in the background reaches it again.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import BlockingConnectionPool
from redis.asyncio.connection import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError, ReadOnlyError, RedisError, ResponseError

from services.common.config.redis_tls import read_files_anew
from services.common.tasks import cancel_and_wait
from services.kvcache.client import Client
from services.kvcache.primaries import Finder, parse

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 1.0
_PROBE_S = {True: 1.0, False: 0.25}
_PROBE_TIMEOUT_S = 0.5
_OLDEST_REDIS = (6, 2)
_PASS_ON = (RedisError, OSError, TimeoutError)


class StoreAwayError(Exception):
    """Redis did not answer in time, or refused; what was asked may or may not have been done."""


class UnsuitableStoreError(Exception):
    """This Redis cannot hold the index; the message says why."""


class _ReplicaError(Exception):
    """A server that answers and is no primary."""


@dataclass(frozen=True)
class StoreSettings:
    """How to reach Redis; `url` as in the configuration key `redis`."""

    url: str
    prefix: str = "if1"
    password: str | None = None
    sentinel_password: str | None = None
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""


class Link:
    """Owns the clients of all servers that were ever used, and what is known of the current one.

    Calls raise StoreAwayError and nothing else because of Redis.
    """

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self._finder = Finder(parse(settings.url), settings.sentinel_password, **_tls(settings))
        # Typed Any: the client's own annotations leave its generic commands untyped.
        self._clients: dict[str, Any] = {}
        self._url = ""
        self._available = False
        self._looked = False
        # After a match timed out nobody waits for another until a probe is answered. Writes go on:
        # they can wait longer, and each one dropped costs a snapshot.
        self._slow = False
        self._unsuitable: str | None = None
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def available(self) -> bool:
        """Whether a primary answered when last asked."""
        return self._available

    @property
    def slow(self) -> bool:
        """Whether a short call timed out and nothing was answered since."""
        return self._slow

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
            await cancel_and_wait(task)
        self._available = False
        await self._finder.close()
        for client in self._clients.values():
            with contextlib.suppress(*_PASS_ON):
                await client.aclose()
                await client.drop()

    async def call(
        self, made: Callable[[Any], Coroutine[Any, Any, Any]], timeout_s: float = CALL_TIMEOUT_S
    ) -> Any:
        """Await `made(client)` on the current primary."""
        if not self._available:
            raise StoreAwayError("Redis is away")
        url = self._url
        try:
            async with asyncio.timeout(timeout_s):
                return await made(self._clients[url])
        except ReadOnlyError as error:
            self._lost(url, error)  # it was demoted: another is the primary now
            raise StoreAwayError(f"Redis is away: {_reason(error)}") from error
        except ResponseError as error:
            # It is there and says no (full, not allowed): the next call may succeed.
            raise StoreAwayError(f"Redis refused: {error}") from error
        except _PASS_ON as error:
            if isinstance(error, TimeoutError) and timeout_s < _PROBE_TIMEOUT_S:
                self._slow = True
                self._wake.set()
            else:
                self._lost(url, error)
            raise StoreAwayError(f"Redis is away: {_reason(error)}") from error

    def _lost(self, url: str, error: Exception) -> None:
        if url != self._url:
            return  # an old primary's end says nothing of the new one
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
            if self._available and await self._still_primary():
                self._slow = False
            else:
                await self._look()
        except (*_PASS_ON, _ReplicaError) as error:
            self._lost(self._url, error)

    async def _still_primary(self) -> bool:
        """Whether the current server goes on as the primary; Sentinels may name another."""
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            await _require_primary(self._clients[self._url])
        if not self._finder.moves:
            return True
        try:
            return (await self._finder.urls())[0] == self._url
        except OSError:
            return True  # Sentinels away and the primary there: nothing is known against it

    async def _look(self) -> None:
        urls = await self._finder.urls()
        found = await asyncio.gather(*map(self._examine, urls), return_exceptions=True)
        for url, unsuitable in zip(urls, found, strict=True):
            if unsuitable is None:
                await self._adopt(url)
                return
        for unsuitable in found:
            if isinstance(unsuitable, str):
                self._refuse(unsuitable)
                return
        error = found[0]
        assert isinstance(error, BaseException)
        raise error

    async def _adopt(self, url: str) -> None:
        old, self._url = self._url, url
        if not self._available or old != url:
            named = "" if len(self._clients) == 1 else f" (primary: {_place(url)})"
            log.info("Redis answers%s", named)
        self._available, self._slow, self._looked, self._unsuitable = True, False, True, None
        if old and old != url:
            with contextlib.suppress(*_PASS_ON):
                await self._clients[old].drop()

    def _refuse(self, unsuitable: str) -> None:
        if unsuitable != self._unsuitable:
            log.error("%s", unsuitable)
        self._unsuitable, self._looked = unsuitable, True
        self._available = self._slow = False

    async def _examine(self, url: str) -> str | None:
        """What makes this server unfit, or None."""
        client = self._clients.get(url)
        if client is None:
            client = Client(_pool(url, self._settings))
            self._clients[url] = client
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            try:
                info: dict[str, Any] = await client.info()
            except NoPermissionError:
                log.warning("the ACL does not allow INFO: Redis's version and mode are not checked")
                await _require_primary(client)
                return None
        if info.get("role", "master") != "master":
            raise _ReplicaError("the only server that answers is a replica")
        return unfit(info)


def unfit(info: dict[str, Any]) -> str | None:
    """Why a server with this INFO cannot hold the index, or None; warns of bad eviction."""
    # Valkey 9 says server_mode.
    mode = info.get("redis_mode") or info.get("server_mode", "standalone")
    if mode == "sentinel":
        return "this is a sentinel, not a Redis: give redis+sentinel://host:port/primary-name"
    if mode != "standalone":
        return (
            f"this Redis runs in {mode} mode: one Match reads a whole prompt's keys at once, and a "
            "Cluster would spread them over nodes; give a single primary"
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


async def _require_primary(client: Any) -> None:
    try:
        role = (await client.execute_command("ROLE"))[0]
    except NoPermissionError:
        await client.execute_command("PING")
        return
    if role != b"master":
        raise _ReplicaError("the server in use became a replica")


def _tls(settings: StoreSettings) -> dict[str, str]:
    files = {
        "ssl_ca_certs": settings.tls_ca,
        "ssl_certfile": settings.tls_cert,
        "ssl_keyfile": settings.tls_key,
    }
    return {key: path for key, path in files.items() if path}


def _pool(url: str, settings: StoreSettings) -> ConnectionPool:
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
    if url.startswith("rediss:"):
        options |= _tls(settings)
    pool = BlockingConnectionPool.from_url(url, **options)
    read_files_anew(pool)
    return pool


def _place(url: str) -> str:
    parts = urlsplit(url)
    return parts.netloc.rpartition("@")[2] or parts.path


def _reason(error: BaseException) -> str:
    return str(error) or "no answer in time"
