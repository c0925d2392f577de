"""The configuration of a balancer; see `python -m services.balancer --help`."""

import re
import socket
from dataclasses import dataclass

from services.balancer.routing.policies import POLICIES, PolicyError, find_policy
from services.common.config.service_config import ServiceConfig
from services.common.config.settings import setting
from services.common.etcd.config import EtcdKeys, endpoints_setting

RESUME_RULES = ("never", "exact", "equal", "any")
"""Values of `carry_on`: which engines may resume a broken stream."""


def _policy(name: str) -> str | None:
    try:
        find_policy(name)
    except PolicyError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class BalancerConfig(EtcdKeys, ServiceConfig):
    """Where engines are found, how one is chosen, and when one is given up."""

    balancer_id: str = setting(
        "", "name in the registry; default: derived from this machine's name and the port"
    )
    etcd: tuple[str, ...] = endpoints_setting("host:port of etcd, where engines register")
    kvcache: str = setting(
        "", "host:port of kvcache, the prefix index; empty: choose by load alone"
    )
    admin_port: int = setting(
        0, "port of the operators' Fleet service; 0 takes a free one", low=0, high=65535
    )
    policy: str = setting(
        "least_time",
        f"how an engine is chosen: {', '.join(POLICIES)}, the name of an entry point in "
        "inferfleet.policies, or module:function",
        check=_policy,
    )
    match_timeout_s: float = setting(
        0.05, "how long the prefix index may take to answer", unit="seconds", low=0.001, high=10
    )
    pressure_s: float = setting(
        0.5, "λ: expected seconds added by an engine with half its blocks held", low=0, high=600
    )
    max_attempts: int = setting(
        3, "engines tried for one request without any progress", low=1, high=32
    )
    carry_on: str = setting(
        "equal",
        "which engines may resume a stream that broke after its first token: exact (equal "
        "numerics, and a deterministic engine or a greedy request), equal (equal numerics), any "
        "(same model), never",
        choices=RESUME_RULES,
    )
    queue_size: int = setting(
        512, "requests of one model that may wait for a slot; more are refused", low=0
    )
    engine_headroom: int = setting(
        4, "slots of an engine beyond the sequences that it runs at once", low=0, high=1024
    )
    patience_s: float = setting(
        1.0, "how long a request waits for a healthy engine", unit="seconds", low=0, high=600
    )
    carry_on_wait_s: float = setting(
        10.0,
        "how long a broken stream waits for an engine that may resume it",
        unit="seconds",
        low=0,
        high=600,
    )
    stall_limit_s: float = setting(
        10.0,
        "an engine without progress for this long (plus its prefill's expected time) is given up",
        unit="seconds",
        low=0.1,
        high=3600,
    )
    breaker_failures: int = setting(3, "consecutive failures that take an engine out of use", low=1)
    breaker_open_s: float = setting(
        1.0,
        "how long it stays out of use at first; doubles up to 30 s",
        unit="seconds",
        low=0.01,
        high=30,
    )
    explain_requests: int = setting(2048, "recent requests that Explain can show", low=1)


def balancer_id_of(config: BalancerConfig, port: int) -> str:
    """The configured name in the registry, or a unique one derived from host name and port.

    It is not derived from `host`, because 0.0.0.0 is the same on every machine.
    """
    name = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())
    return config.balancer_id or f"balancer-{name}-{port}"
