"""The options of a local fleet, and the command line of each service that follows from them."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
"""Where the services run and read their files."""
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
    gateways: int = 1
    balancers: int = 1
    redis: str = ""
    """URL of a Redis to use; empty: the fleet starts its own."""
    etcd: str = ""
    """Members of an etcd to use, as in the key `etcd`; empty: the fleet starts its own."""
    spare_engines: int = 0
    """Engines beyond `engines` that stand by."""

    @property
    def names(self) -> list[str]:
        """Names of all services, in starting order."""
        return service_names(self.engine_processes, self.gateways, self.balancers)

    @property
    def engine_processes(self) -> int:
        """Engines in use and spares."""
        return self.engines + self.spare_engines

    @property
    def own_redis(self) -> bool:
        """Whether the fleet starts a Redis: neither --redis nor --set kvcache.redis names one."""
        return not self.redis and "kvcache" not in self._services_with("redis")

    @property
    def own_etcd(self) -> bool:
        """Whether the fleet starts an etcd: no option names one for all services that use it."""
        return not self.etcd and not {"engine", "balancer", "gateway"} <= self._services_with(
            "etcd"
        )

    def redis_url(self, own: str) -> str:
        """URL of the Redis in use: the one that was named, else that of the fleet at `own`."""
        named = self.redis or self.setting("kvcache", "redis")
        return named or f"redis://{own}/0"

    def etcd_endpoints(self, own: str) -> str:
        """Members of the etcd in use: those that were named, else the fleet's own."""
        return self.etcd or ("" if self.own_etcd else self.setting("gateway", "etcd")) or own

    def _services_with(self, key: str) -> set[str]:
        return {service for service, own, value in self.settings if own == key and value}

    def setting(self, service: str, key: str) -> str:
        """The value of --set SERVICE.KEY that `keys_of` uses: the last one given; "" for none."""
        found = [value for name, own, value in self.settings if (name, own) == (service, key)]
        return found[-1] if found else ""


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
    more_gateways: tuple[tuple[str, str], ...] = ()
    """gRPC and HTTP address of each gateway after the first."""
    more_balancers: tuple[tuple[str, str], ...] = ()
    """gRPC and admin address of each balancer after the first."""
    store_password_file: str = ""
    """File with the password of the fleet's own Redis and etcd."""


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
    return f"{0.5 / options.engine_processes:.3f}"


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
    from services.common.config.redis_keys import is_one_server  # not in the wheel

    redis, etcd = _redis_keys(options, at), _etcd_keys(options, at)
    keys = {"kvcache": {**_listen(at.kvcache), **redis}}
    balancers = ((at.balancer, at.admin), *at.more_balancers)
    for name, (address, admin) in zip(
        _numbered("balancer", len(balancers)), balancers, strict=True
    ):
        keys[name] = {
            **_listen(address),
            "balancer-id": name,
            **etcd,
            "kvcache": at.kvcache,
            "admin-port": admin.rpartition(":")[2],
        }
    for index, address in enumerate(at.engines, start=1):
        name = f"engine-{index}"
        keys[name] = _engine(options, at, address, name)
        if options.spare_engines:
            keys[name]["standby-file"] = str(standby_file(ready_file[name]))
    gateways = ((at.gateway, at.http), *at.more_gateways)
    for name, (address, http) in zip(_numbered("gateway", len(gateways)), gateways, strict=True):
        keys[name] = {
            **_listen(address),
            "http-port": http.rpartition(":")[2],
            **etcd,
            "balancers": ",".join(address for address, _ in balancers),
        }
        if len(gateways) > 1 and is_one_server(redis["redis"]):
            keys[name] |= redis  # they count quotas together
    common = {
        "fleet-token-file": str(token_file),
        "otlp-endpoint": f"http://{at.otlp}",
        "drain-grace-s": f"{options.grace_s:g}",
    }
    return {
        name: {
            **common,
            "ready-file": str(ready_file[name]),
            **_with_settings(own, _set_for(name, options.settings)),
        }
        for name, own in keys.items()
    }


def standby_file(ready_file: Path) -> Path:
    """The file whose existence puts an engine into use, beside its ready file."""
    return ready_file.with_suffix(".in-use")


def _redis_keys(options: Options, at: Addresses) -> dict[str, str]:
    """The index's Redis, for it and for gateways that count quotas together."""
    keys = {"redis": options.redis_url(at.redis)}
    if options.own_redis:
        return {**keys, "redis-password-file": at.store_password_file}
    names = ("password_file", "tls_ca_file", "tls_cert_file", "tls_key_file")
    given = {name: options.setting("kvcache", f"redis_{name}") for name in names}
    return keys | {f"redis-{k.replace('_', '-')}": value for k, value in given.items() if value}


def _etcd_keys(options: Options, at: Addresses) -> dict[str, str]:
    keys = {"etcd": options.etcd_endpoints(at.etcd)}
    own = {"etcd-user": "root", "etcd-password-file": at.store_password_file}
    return {**keys, **own} if options.own_etcd else keys


def _with_settings(own: dict[str, str], settings: dict[str, str]) -> dict[str, str]:
    """A service's keys with those of --set over them; another store gets no password of ours."""
    for store in ("redis", "etcd"):
        if store in settings:
            own = {key: value for key, value in own.items() if not key.startswith(f"{store}-")}
    return {**own, **settings}


def service_names(engines: int, gateways: int = 1, balancers: int = 1) -> list[str]:
    """The service names that `plan` uses, in its order. Engines always have a number."""
    numbered = [f"engine-{index}" for index in range(1, engines + 1)]
    first = ["kvcache", *_numbered("balancer", balancers)]
    return [*first, *numbered, *_numbered("gateway", gateways)]


def _numbered(kind: str, count: int) -> list[str]:
    """Names of a kind of service; the only one has no number."""
    return [kind] if count == 1 else [f"{kind}-{index}" for index in range(1, count + 1)]


def _engine(options: Options, at: Addresses, address: str, name: str) -> dict[str, str]:
    return {
        **_listen(address),
        "engine-id": name,
        **_etcd_keys(options, at),
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
