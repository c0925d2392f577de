"""The gateway's options; see `python -m services.gateway --help`."""

import re
from dataclasses import dataclass

from services.common.config.redis_keys import RedisKeys
from services.common.config.service_config import ServiceConfig
from services.common.config.settings import setting
from services.common.etcd.config import EtcdKeys, endpoints_setting

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#,@]+")
_DEFAULT_PORT = re.compile(r"(http://.*):80|(https://.*):443")


def _check_aliases(pairs: tuple[str, ...]) -> str | None:
    bad = [pair for pair in pairs if not all(pair.partition("="))]
    return f"{bad[0]!r} is not of the form alias=model" if bad else None


def _check_prefix(prefix: str) -> str | None:
    return None if re.fullmatch(r"[a-z0-9:_-]{1,32}", prefix) else "expected 1-32 of a-z 0-9 : _ -"


def _check_origins(origins: tuple[str, ...]) -> str | None:
    bad = [origin for origin in origins if origin != "*" and not _ORIGIN.fullmatch(origin)]
    if bad:
        return f"{bad[0]!r} is not of the form scheme://host[:port], nor *"
    for origin in origins:
        if not origin.isascii():
            return f"{origin!r} never matches: write its host as browsers send it, as xn--…"
        sent = _DEFAULT_PORT.sub(lambda found: found[1] or found[2], origin.lower())
        if sent != origin:
            return f"{origin!r} never matches: browsers send {sent!r}, write that"
    return None


@dataclass(frozen=True)
class GatewayConfig(EtcdKeys, RedisKeys, ServiceConfig):
    """Where the gateway listens, which services it uses, and which callers it accepts."""

    port: int = setting(50051, "port of the public gRPC API; 0 takes a free one", low=0, high=65535)
    http_port: int = setting(
        8080, "port of the OpenAI-compatible HTTP API; 0 takes a free one", low=0, high=65535
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        "origins whose web pages may call the HTTP API, as scheme://host[:port]; * is every "
        "origin, empty none",
        check=_check_origins,
    )
    etcd: tuple[str, ...] = endpoints_setting(
        "host:port of etcd, where engines and balancers register"
    )
    engines: tuple[str, ...] = setting(
        (), "host:port of engines to query for their models, without etcd"
    )
    balancers: tuple[str, ...] = setting(
        (), "host:port of balancers, or of one engine; empty: those registered in etcd"
    )
    aliases: tuple[str, ...] = setting(
        (), "additional names of models, as alias=model", check=_check_aliases
    )
    api_keys_file: str = setting(
        "",
        "lines `tenant sha256:<hex of the key>` and `tenant limits requests_per_min=…`, reloaded "
        "when changed; empty: no key is required",
    )
    quota_prefix: str = setting("ifq1", "prefix of the quotas' keys in Redis", check=_check_prefix)
    quota_timeout_s: float = setting(
        0.05,
        "longest wait for Redis before the gateway decides on a quota alone",
        unit="seconds",
        low=0.001,
        high=5,
    )
    usage_file: str = setting(
        "", "one JSON line per ended request; - is stdout, empty: none", written=True
    )
    usage_stream: str = setting("", "Redis stream for the same records; empty: none")
    usage_stream_entries: int = setting(
        100_000, "approximate number of records that the stream keeps", low=1
    )
    audit_file: str = setting(
        "",
        "one JSON line per decision on a caller and per action of an operator, without prompts; "
        "- is stdout, empty: none",
        written=True,
    )
    record_file_mib: int = setting(
        100, "size at which usage_file and audit_file are rotated", unit="MiB", low=1
    )
    record_files_kept: int = setting(10, "rotated files kept of each file", low=0, high=1000)
    request_timeout_s: float = setting(
        600.0,
        "longest life of a request, also if its caller sets no deadline",
        unit="seconds",
        low=0.1,
    )
    stall_timeout_s: float = setting(
        60.0,
        "a stream that is silent for longer after its first message ends",
        unit="seconds",
        low=0.1,
    )
    connect_retry_s: float = setting(
        3.0, "how long to try to reach a balancer", unit="seconds", low=0
    )
    text_threads: int = setting(2, "threads that render and tokenize long prompts", low=1, high=64)
    template_timeout_s: float = setting(
        5.0, "time for a chat template to render one chat", unit="seconds", low=0.1, high=600
    )
    http_head_timeout_s: float = setting(
        10.0, "time for the head of an HTTP request, from its first byte", unit="seconds", low=0.1
    )
    http_open_heads: int = setting(
        1024,
        "HTTP connections with an unfinished head, or without a request yet; beyond that, the "
        "oldest gets 503, or is closed if it has sent nothing",
        low=1,
    )
    http_body_timeout_s: float = setting(
        30.0, "longest silence of a client within its HTTP body", unit="seconds", low=0.1
    )
