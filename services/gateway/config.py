"""What a gateway is told at start; see `python -m services.gateway --help`."""

import re
from dataclasses import dataclass

from services.common.config.redis_keys import RedisKeys
from services.common.config.service_config import ServiceConfig
from services.common.config.settings import setting
from services.common.etcd.config import EtcdKeys, endpoints_setting


def _aliases(pairs: tuple[str, ...]) -> str | None:
    bad = [pair for pair in pairs if not all(pair.partition("="))]
    return f"{bad[0]!r} is not alias=model" if bad else None


def _bad_prefix(prefix: str) -> str | None:
    return None if re.fullmatch(r"[a-z0-9:_-]{1,32}", prefix) else "expected 1-32 of a-z 0-9 : _ -"


@dataclass(frozen=True)
class GatewayConfig(EtcdKeys, RedisKeys, ServiceConfig):
    """Where the fleet's face listens, whom it asks, and whom it lets in."""

    port: int = setting(50051, "port of the public gRPC; 0 takes a free one", low=0, high=65535)
    http_port: int = setting(
        8080, "port of the OpenAI-compatible HTTP; 0 takes a free one", low=0, high=65535
    )
    etcd: tuple[str, ...] = endpoints_setting(
        "host:port of etcd, where engines and balancers say that they live"
    )
    engines: tuple[str, ...] = setting(
        (), "host:port of engines to ask for their models, when there is no etcd"
    )
    balancers: tuple[str, ...] = setting(
        (), "host:port of balancers (or of one engine); empty: those in etcd"
    )
    aliases: tuple[str, ...] = setting(
        (), "further names of models, as alias=model", check=_aliases
    )
    api_keys_file: str = setting(
        "",
        "lines `tenant sha256:<hex of the key>` and `tenant limits requests_per_min=…`, read again "
        "when changed; empty: no key asked",
    )
    quota_prefix: str = setting(
        "ifq1", "starts every key of the quotas in Redis", check=_bad_prefix
    )
    quota_timeout_s: float = setting(
        0.05,
        "longest wait for Redis before a gateway decides on a quota alone",
        unit="seconds",
        low=0.001,
        high=5,
    )
    usage_file: str = setting(
        "", "one JSON line per ended request; - is stdout, empty: none", written=True
    )
    usage_stream: str = setting("", "Redis stream for the same records; empty: none")
    usage_stream_entries: int = setting(100_000, "about how many records the stream keeps", low=1)
    audit_file: str = setting(
        "",
        "one JSON line per decision on a caller and per act of an operator, without any prompt; "
        "- is stdout, empty: none",
        written=True,
    )
    record_file_mib: int = setting(
        100, "size at which usage_file and audit_file are rotated", unit="MiB", low=1
    )
    record_files_kept: int = setting(10, "rotated files kept of each", low=0, high=1000)
    request_timeout_s: float = setting(
        600.0, "longest life of a request whose caller sets no deadline", unit="seconds", low=0.1
    )
    stall_timeout_s: float = setting(
        60.0, "a stream silent for so long after its first message ends", unit="seconds", low=0.1
    )
    connect_retry_s: float = setting(
        3.0, "how long to look for a balancer that can be reached", unit="seconds", low=0
    )
    text_threads: int = setting(2, "threads that render and tokenise long prompts", low=1, high=64)
