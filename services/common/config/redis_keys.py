"""The configuration keys for a single Redis, and the client made from them."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qs, urlsplit

import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from services.common.config.redis_tls import read_files_anew
from services.common.config.settings import ConfigError, read_secret, setting

_SECOND_URL = re.compile(r",\s*[a-z+]+://|^[^/]*//[^/]*,")


def number_problem(parts: SplitResult) -> str | None:
    """The problem of a URL's port or database, which a client would silently replace; or None."""
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        return f"expected a port from 1 to 65535 in {parts.netloc.rpartition('@')[2]!r}"
    databases = parse_qs(parts.query, keep_blank_values=True).get("db", [])
    if parts.scheme != "unix" and parts.path.strip("/"):
        databases = [parts.path[1:], *databases]
    bad = [text for text in databases if not re.fullmatch(r"[0-9]{1,9}/?", text)]
    return f"expected the number of a database, not {bad[0]!r}" if bad else None


def is_one_server(url: str) -> bool:
    """Whether a URL names one Redis, and not a list of servers or Sentinels."""
    return not (url.partition("://")[0].endswith("+sentinel") or _SECOND_URL.search(url))


def _bad_url(url: str) -> str | None:
    if not url:
        return None
    if not is_one_server(url):
        return "one URL is needed: lists of servers and Sentinels are for the index"
    try:
        parts = urlsplit(url)
    except ValueError as error:
        return str(error)
    if parts.scheme not in ("redis", "rediss", "unix"):
        return "expected redis://, rediss:// (TLS) or unix://"
    if parts.password or "password=" in parts.query:
        return "put the password into the file that redis_password_file names"
    return number_problem(parts)


@dataclass(frozen=True)
class RedisKeys:
    """Keys of a service that uses one Redis; `connect` makes the client."""

    redis: str = setting(
        "",
        "Redis >= 6.2 or Valkey where quotas are counted by all gateways together, as "
        "redis://[user@]host:port/db, rediss:// for TLS; empty: each gateway counts alone",
        check=_bad_url,
    )
    redis_password_file: str = setting("", "file with the password of the URL's user")
    redis_tls_ca_file: str = setting("", "CA of Redis's certificate; empty: the system's")
    redis_tls_cert_file: str = setting("", "client certificate for Redis, if it asks for one")
    redis_tls_key_file: str = setting("", "key of redis_tls_cert_file")


def connect(config: RedisKeys, *, timeout_s: float, name: str) -> aioredis.Redis:
    """Make a client whose calls fail instead of waiting or retrying; sends nothing yet.

    Raises:
        ConfigError: a file cannot be read.
    """
    options: dict[str, Any] = {
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "max_connections": 64,
        "timeout": timeout_s,
        "client_name": name,
    }
    if config.redis_password_file:
        options["password"] = read_secret(config.redis_password_file, "redis_password_file")
    if config.redis.startswith("rediss:"):
        options |= _tls_of(config)
    pool = aioredis.BlockingConnectionPool.from_url(config.redis, **options)
    read_files_anew(pool)
    return aioredis.Redis(connection_pool=pool)


def _tls_of(config: RedisKeys) -> dict[str, str]:
    names = {
        "ssl_ca_certs": "redis_tls_ca_file",
        "ssl_certfile": "redis_tls_cert_file",
        "ssl_keyfile": "redis_tls_key_file",
    }
    files = {option: getattr(config, name) for option, name in names.items()}
    for option, path in files.items():
        if path and not Path(path).is_file():
            raise ConfigError(f"{names[option]}: cannot read {path}: no such file")
    return {option: path for option, path in files.items() if path}
