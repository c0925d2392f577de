"""The connection to Redis: finds the primary, follows a failover, and bounds every call in time.

While Redis is unavailable, calls fail at once; a probe in the background finds it again.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

from redis.exceptions import ReadOnlyError, RedisError, ResponseError

from services.common.tasks import cancel_and_wait
from services.kvcache.redis_client import Client
from services.kvcache.redis_primaries import PrimaryFinder, parse_redis_url
from services.kvcache.redis_server_check import ReplicaError, problem_of, require_primary
from services.kvcache.redis_settings import CALL_TIMEOUT_S, RedisSettings

log = logging.getLogger(__name__)

_PROBE_S = 1.0
_PROBE_AWAY_S = 0.25
_PROBE_TIMEOUT_S = 0.5
_REDIS_ERRORS = (RedisError, OSError, TimeoutError)


class RedisUnavailableError(Exception):
    """Redis did not answer in time, or refused; a write may or may not have been done."""


class UnsuitableRedisError(Exception):
    """This Redis cannot hold the index; the message gives the reason."""


class RedisConnection:
    """Owns the clients of all servers used so far, and the state of the current one.

    Because of Redis, calls raise RedisUnavailableError and nothing else.
    """

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings
        self._finder = PrimaryFinder(
            parse_redis_url(settings.url), settings.sentinel_password, **settings.tls_options
        )
        # Typed Any: the client's own annotations leave its generic commands untyped.
        self._clients: dict[str, Any] = {}
        self._url: str | None = None
        """The current primary; None before the first was found."""
        self._available = False
        self._probed = False
        self._slow = False
        self._problem: str | None = None
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def available(self) -> bool:
        """Whether a primary answered the last call or probe."""
        return self._available

    @property
    def slow(self) -> bool:
        """Whether a short call timed out and no probe was answered since.

        No Match should wait for Redis then. Writes go on: they can wait longer, and each one that
        is dropped costs a snapshot.
        """
        return self._slow

    async def start(self) -> None:
        """Probe Redis once, then keep probing in the background.

        Raises:
            UnsuitableRedisError: Redis answered and cannot be used. No error if it is unavailable.
        """
        await self._probe()
        if self._problem is not None:
            raise UnsuitableRedisError(self._problem)
        self._task = asyncio.create_task(self._keep_probing(), name="redis probe")

    async def close(self) -> None:
        """Close all connections; idempotent."""
        task, self._task = self._task, None
        if task is not None:
            await cancel_and_wait(task)
        self._available = False
        await self._finder.close()
        for client in self._clients.values():
            with contextlib.suppress(*_REDIS_ERRORS):
                await client.aclose()
                await client.drop()

    async def call(
        self,
        operation: Callable[[Any], Coroutine[Any, Any, Any]],
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Any:
        """Await `operation(client)` on the current primary.

        Raises:
            RedisUnavailableError: Redis is unavailable, refused, or exceeded `timeout_s`.
        """
        url = self._url
        if not self._available or url is None:
            raise RedisUnavailableError("Redis is unavailable")
        try:
            async with asyncio.timeout(timeout_s):
                return await operation(self._clients[url])
        except ReadOnlyError as error:
            self._mark_lost(url, error)  # the server was demoted: another is the primary now
            raise RedisUnavailableError(f"Redis is unavailable: {_reason(error)}") from error
        except ResponseError as error:
            # The server answers and refuses (full, not allowed): the next call may succeed.
            raise RedisUnavailableError(f"Redis refused the command: {error}") from error
        except _REDIS_ERRORS as error:
            if isinstance(error, TimeoutError) and timeout_s < _PROBE_TIMEOUT_S:
                self._slow = True
                self._wake.set()
            else:
                self._mark_lost(url, error)
            raise RedisUnavailableError(f"Redis is unavailable: {_reason(error)}") from error

    def _mark_lost(self, url: str | None, error: Exception) -> None:
        if url != self._url:
            return  # a former primary failed, which does not concern the current one
        if self._available or not self._probed:
            log.warning("Redis is unavailable; continuing without it: %s", _reason(error))
            self._wake.set()
        self._available, self._probed = False, True

    async def _keep_probing(self) -> None:
        while True:
            pause_s = _PROBE_S if self._available and not self._slow else _PROBE_AWAY_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._wake.wait()
            self._wake.clear()
            await self._probe()

    async def _probe(self) -> None:
        try:
            if self._available and await self._is_still_primary():
                self._slow = False
            else:
                await self._find_primary()
        except (*_REDIS_ERRORS, ReplicaError) as error:
            self._mark_lost(self._url, error)

    async def _is_still_primary(self) -> bool:
        """Whether the current server is still the primary; Sentinels may name another one."""
        assert self._url is not None, "no primary has been found"
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            await require_primary(self._clients[self._url])
        if not self._finder.can_change:
            return True
        try:
            return (await self._finder.urls())[0] == self._url
        except OSError:
            return True  # no Sentinel answers, and the server in use calls itself a primary

    async def _find_primary(self) -> None:
        urls = await self._finder.urls()
        problems = await asyncio.gather(*map(self._examine, urls), return_exceptions=True)
        for url, problem in zip(urls, problems, strict=True):
            if problem is None:
                await self._adopt(url)
                return
        for problem in problems:
            if isinstance(problem, str):
                self._reject(problem)
                return
        error = problems[0]
        assert isinstance(error, BaseException)
        raise error

    async def _adopt(self, url: str) -> None:
        old, self._url = self._url, url
        if not self._available or old != url:
            primary = "" if len(self._clients) == 1 else f" (primary: {_host_of(url)})"
            log.info("Redis is available%s", primary)
        self._available, self._slow, self._probed, self._problem = True, False, True, None
        if old is not None and old != url:
            with contextlib.suppress(*_REDIS_ERRORS):
                await self._clients[old].drop()

    def _reject(self, problem: str) -> None:
        if problem != self._problem:
            log.error("%s", problem)
        self._problem, self._probed = problem, True
        self._available = self._slow = False

    async def _examine(self, url: str) -> str | None:
        """Why this server cannot be used; None if it can."""
        client = self._clients.get(url)
        if client is None:
            client = Client(self._settings.make_pool(url))
            self._clients[url] = client
        async with asyncio.timeout(_PROBE_TIMEOUT_S):
            return await problem_of(client)


def _host_of(url: str) -> str:
    parts = urlsplit(url)
    return parts.netloc.rpartition("@")[2] or parts.path


def _reason(error: BaseException) -> str:
    return str(error) or "no answer in time"
