"""The options of a local fleet, and the command line of each service that follows from them."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_MODEL_KV_MEMORY = "1GiB"
"""Ample for the default model and quick to allocate. Other models get a share of free memory."""
DRAIN_GRACE_S = 10.0


@dataclass(frozen=True)
class Options:
    """One fleet on this machine."""

    state_dir: Path
    engines: int = 2
    model: str = ""
    dtype: str = "float32"
    port: int = 50051
    http_port: int = 8080
    grace_s: float = DRAIN_GRACE_S
    """Seconds that running streams may take when the fleet stops."""
    settings: tuple[tuple[str, str, str], ...] = ()
    """(service, key, value): configuration keys of one service; they override all others."""


@dataclass(frozen=True)
class Addresses:
    """host:port of each process. Chosen once, so that a restarted service keeps its address."""

    gateway: str
    http: str
    redis: str
    etcd: str
    kvcache: str
    balancer: str
    admin: str
    engines: tuple[str, ...]
    otlp: str


@dataclass(frozen=True)
class ServicePlan:
    """The command line of one process."""

    name: str
    argv: tuple[str, ...]


Planner = Callable[["Options", "Addresses", Path, Mapping[str, Path]], Sequence["ServicePlan"]]
"""(options, addresses, token file, ready file by name) -> processes in starting order."""


def threads_per_engine(engines: int) -> int:
    """Cores divided by engines: engines that share cores wait for each other and slow down."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, cores // engines)


def kv_memory(options: Options) -> str:
    """Memory for KV blocks of each engine: a size, or a fraction of the free memory."""
    if options.model in ("", DEFAULT_MODEL):
        return DEFAULT_MODEL_KV_MEMORY
    return f"{0.5 / options.engines:.3f}"


def plan(
    options: Options, at: Addresses, token_file: Path, ready_file: Mapping[str, Path]
) -> list[ServicePlan]:
    """The services of a fleet, in starting order."""
    return [
        _service(name, keys) for name, keys in keys_of(options, at, token_file, ready_file).items()
    ]


def keys_of(
    options: Options, at: Addresses, token_file: Path, ready_file: Mapping[str, Path]
) -> dict[str, dict[str, str]]:
    """Configuration keys by service name, in the order of `plan`; spelled as flags, with dashes."""
    kvcache = {**_listen(at.kvcache), "redis": f"redis://{at.redis}/0"}
    balancer = {
        **_listen(at.balancer),
        "balancer-id": "balancer",
        "etcd": at.etcd,
        "kvcache": at.kvcache,
        "admin-port": at.admin.rpartition(":")[2],
    }
    gateway = {
        **_listen(at.gateway),
        "http-port": at.http.rpartition(":")[2],
        "etcd": at.etcd,
        "balancers": at.balancer,
    }
    keys = {"kvcache": kvcache, "balancer": balancer}
    for index, address in enumerate(at.engines, start=1):
        keys[f"engine-{index}"] = _engine(options, at, address, f"engine-{index}")
    keys["gateway"] = gateway
    common = {
        "fleet-token-file": str(token_file),
        "otlp-endpoint": f"http://{at.otlp}",
        "drain-grace-s": f"{options.grace_s:g}",
    }
    return {
        name: {
            **common,
            "ready-file": str(ready_file[name]),
            **own,
            **_set_for(name, options.settings),
        }
        for name, own in keys.items()
    }


def service_names(engines: int) -> list[str]:
    """The service names that `plan` uses, in its order."""
    numbered = [f"engine-{index}" for index in range(1, engines + 1)]
    return ["kvcache", "balancer", *numbered, "gateway"]


def _engine(options: Options, at: Addresses, address: str, name: str) -> dict[str, str]:
    return {
        **_listen(address),
        "engine-id": name,
        "etcd": at.etcd,
        "kvcache": at.kvcache,
        "model": options.model or DEFAULT_MODEL,
        "dtype": options.dtype,
        "threads": str(threads_per_engine(options.engines)),
        "kv-memory": kv_memory(options),
    }


def _listen(address: str) -> dict[str, str]:
    host, _, port = address.rpartition(":")
    return {"host": host, "port": port}


def _set_for(name: str, settings: Sequence[tuple[str, str, str]]) -> dict[str, str]:
    names = (name, name.partition("-")[0])
    return {key.replace("_", "-"): value for service, key, value in settings if service in names}


def _service(name: str, keys: Mapping[str, str]) -> ServicePlan:
    kind = name.partition("-")[0]
    flags = [f"--{key}={value}" for key, value in keys.items()]
    return ServicePlan(name, (sys.executable, "-m", f"services.{kind}", *flags))
