"""Where the primary of Redis can be found: at one URL, at one of several, or through Sentinels.

Several URLs are for replicas that something else promotes: the first server that calls itself a
primary is used. Replication is asynchronous, so a promoted replica may lack the last writes. The
epochs and sequence numbers in the index reveal that, and the engines repeat what is missing.
"""

import asyncio
import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

import redis.asyncio as aioredis
from redis.exceptions import RedisError

from services.common.config.redis_keys import number_problem

SENTINEL_TIMEOUT_S = 0.4
_SENTINEL_PORT = 26379
_SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]]+)(?::(\d{1,5}))?")


@dataclass(frozen=True)
class Sentinels:
    """A group of Sentinels, and the name of the primary that they watch."""

    hosts: tuple[tuple[str, int], ...]
    name: str
    scheme: str
    user: str
    database: str

    def url_of(self, host: str, port: int) -> str:
        """The URL of a primary at this address."""
        shown = f"[{host}]" if ":" in host else host
        user = f"{self.user}@" if self.user else ""
        return f"{self.scheme}://{user}{shown}:{port}/{self.database}"


@dataclass(frozen=True)
class Primaries:
    """The parsed configuration key `redis`: URLs in order of preference, or Sentinels."""

    urls: tuple[str, ...] = ()
    sentinels: Sentinels | None = None


def parse_redis_url(text: str) -> Primaries:
    """Parse the configuration key `redis`.

    Raises:
        ValueError: the value is malformed; the message gives the reason.
    """
    # URLs are separated only before a scheme, because one URL can list several Sentinels.
    urls = [part.strip() for part in re.split(r",(?=\s*[a-z+]+://)", text)]
    parts = [_split(url) for url in urls]
    for part in parts:
        _check(part)
    if parts[0].scheme not in _SCHEMES:
        if any(part.scheme in _SCHEMES for part in parts):
            raise ValueError("Sentinels and plain URLs cannot be combined")
        return Primaries(urls=tuple(urls))
    if len(urls) > 1:
        raise ValueError(
            "expected the Sentinels as one URL: redis+sentinel://host:port,host:port/name"
        )
    return Primaries(sentinels=_sentinels(parts[0]))


class PrimaryFinder:
    """Finds the servers that may be the primary."""

    def __init__(self, primaries: Primaries, sentinel_password: str | None, **tls: Any) -> None:
        self._primaries = primaries
        self._clients: list[Any] = []
        sentinels = primaries.sentinels
        if sentinels is not None:
            self._clients = [
                aioredis.Redis(
                    host=host,
                    port=port,
                    password=sentinel_password,
                    socket_timeout=SENTINEL_TIMEOUT_S,
                    socket_connect_timeout=SENTINEL_TIMEOUT_S,
                    ssl=sentinels.scheme == "rediss",
                    **tls,
                )
                for host, port in sentinels.hosts
            ]

    @property
    def can_change(self) -> bool:
        """Whether `urls` can return another answer later."""
        return self._primaries.sentinels is not None

    async def urls(self) -> Sequence[str]:
        """URLs to examine, best first; the one that most Sentinels name comes first.

        Raises:
            OSError: no Sentinel names a primary.
        """
        sentinels = self._primaries.sentinels
        if sentinels is None:
            return self._primaries.urls
        answers = await asyncio.gather(
            *(self._query(client, sentinels) for client in self._clients)
        )
        votes = [url for url in answers if url]
        if not votes:
            raise OSError(f"no Sentinel names a primary called {sentinels.name!r}")
        return sorted(dict.fromkeys(votes), key=votes.count, reverse=True)

    async def close(self) -> None:
        """Close the connections to Sentinels."""
        for client in self._clients:
            with contextlib.suppress(RedisError, OSError):
                await client.aclose()

    async def _query(self, client: Any, sentinels: Sentinels) -> str | None:
        try:
            async with asyncio.timeout(SENTINEL_TIMEOUT_S):
                found = await client.execute_command(
                    "SENTINEL", "GET-MASTER-ADDR-BY-NAME", sentinels.name
                )
        except (RedisError, OSError, TimeoutError):
            return None
        if not found:
            return None
        host, port = (bytes(part).decode() for part in found)
        return sentinels.url_of(host, int(port))


def _split(url: str) -> SplitResult:
    scheme, _, rest = url.partition("://")
    if scheme not in _SCHEMES:
        return urlsplit(url)
    # The standard library cannot parse a URL with several hosts, which may have brackets.
    place, _, query = rest.partition("?")
    hosts, _, path = place.partition("/")
    return SplitResult(scheme, hosts, f"/{path}", query, "")


def _check(parts: SplitResult) -> None:
    if parts.scheme not in ("redis", "rediss", "unix", *_SCHEMES):
        raise ValueError(
            "expected redis://, rediss:// (TLS), unix:// or redis+sentinel://host:port,…/name"
        )
    if ":" in parts.netloc.rpartition("@")[0] or "password=" in parts.query:
        raise ValueError("put the password into the file that redis_password_file names")
    problem = None if parts.scheme in _SCHEMES else number_problem(parts)
    if problem:
        raise ValueError(problem)


def _sentinels(parts: SplitResult) -> Sentinels:
    user, _, hosts = parts.netloc.rpartition("@")
    name, _, database = parts.path.strip("/").partition("/")
    if not name:
        raise ValueError(
            "name the primary that the Sentinels watch: redis+sentinel://host:port/name"
        )
    if not (database or "0").isdigit():
        raise ValueError(f"expected the number of a database after the name, not {database!r}")
    found = []
    for text in hosts.split(","):
        match = _HOST.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"expected host:port of a Sentinel, not {text!r}")
        if not 1 <= int(match[2] or _SENTINEL_PORT) <= 65535:
            raise ValueError(f"expected a port from 1 to 65535 in {text!r}")
        found.append((match[1].strip("[]"), int(match[2] or _SENTINEL_PORT)))
    return Sentinels(tuple(found), name, _SCHEMES[parts.scheme], user, database or "0")
