"""Configuration keys of the KV-cache service."""

import re
from dataclasses import dataclass

from services.common.config.service_config import ServiceConfig
from services.common.config.settings import setting
from services.kvcache.redis_primaries import parse_redis_url


def _bad_url(url: str) -> str | None:
    try:
        parse_redis_url(url)
    except ValueError as error:
        return str(error)
    return None


def _bad_prefix(prefix: str) -> str | None:
    return None if re.fullmatch(r"[a-z0-9:_-]{1,32}", prefix) else "expected 1-32 of a-z 0-9 : _ -"


@dataclass(frozen=True)
class KvCacheConfig(ServiceConfig):
    """Where the index is kept and how large it may become."""

    redis: str = setting(
        "redis://127.0.0.1:6379/0",
        "Redis >= 6.2 or Valkey, as redis://[user@]host:port/db, rediss:// for TLS; several URLs, "
        "comma-separated, of which the first primary is used; or "
        "redis+sentinel://host:port,host:port/primary-name/db; not a Cluster",
        check=_bad_url,
    )
    redis_password_file: str = setting("", "file with the password of the URL's user")
    redis_sentinel_password_file: str = setting("", "file with the Sentinels' own password")
    redis_tls_ca_file: str = setting("", "CA of Redis's certificate; empty: the system's")
    redis_tls_cert_file: str = setting("", "client certificate for Redis, if it asks for one")
    redis_tls_key_file: str = setting("", "key of redis_tls_cert_file")
    redis_prefix: str = setting(
        "if1", "starts every key of this index; part of each entry's size", check=_bad_prefix
    )
    match_timeout_s: float = setting(
        0.05,
        "longest wait for Redis in a Match before it answers 'unknown'",
        unit="seconds",
        low=0.001,
        high=10,
    )
    max_entries: int = setting(
        2_000_000, "most blocks kept in the index, at about 150 bytes each", low=1
    )
    entry_ttl_s: int = setting(
        86_400,
        "life of an entry that no sweep renews; makes entries evictable under volatile-* policies",
        unit="seconds",
        low=60,
    )
    owner_ttl_s: int = setting(
        3_600, "silence after which an engine's record is removed", unit="seconds", low=30
    )
    sweep_interval_s: float = setting(
        1_800.0, "longest time between two sweeps of the whole index", unit="seconds", low=1
    )
