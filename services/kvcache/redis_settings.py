"""How the KV-cache service reaches Redis: settings, TLS and connection pools."""

from dataclasses import dataclass
from typing import Any

from redis.asyncio import BlockingConnectionPool
from redis.asyncio.connection import ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from services.common.config.redis_tls import read_files_anew

CALL_TIMEOUT_S = 1.0
_MAX_CONNECTIONS = 64


@dataclass(frozen=True)
class RedisSettings:
    """How to reach Redis; `url` has the form of the configuration key `redis`."""

    url: str
    prefix: str = "if1"
    password: str | None = None
    sentinel_password: str | None = None
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""

    @property
    def tls_options(self) -> dict[str, str]:
        """redis-py's options for the TLS files that are set."""
        files = {
            "ssl_ca_certs": self.tls_ca,
            "ssl_certfile": self.tls_cert,
            "ssl_keyfile": self.tls_key,
        }
        return {key: path for key, path in files.items() if path}

    def make_pool(self, url: str) -> ConnectionPool:
        """A pool of connections to one server, without retries of redis-py's own."""
        options: dict[str, Any] = {
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
            "socket_timeout": CALL_TIMEOUT_S,
            "socket_connect_timeout": CALL_TIMEOUT_S,
            "max_connections": _MAX_CONNECTIONS,
            "timeout": CALL_TIMEOUT_S,
            "client_name": "inferfleet-kvcache",
        }
        if self.password is not None:
            options["password"] = self.password
        if url.startswith("rediss:"):
            options |= self.tls_options
        pool = BlockingConnectionPool.from_url(url, **options)
        read_files_anew(pool)
        return pool
