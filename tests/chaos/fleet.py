"""The fleet under test: real services, Redis and etcd as processes of their own, several of each.

Children die with this process, even when it is killed, and are started again when they end, as a
supervisor would do, but at once.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from inferfleet_cli.supervisor import ports
from inferfleet_cli.supervisor.child import Child
from inferfleet_cli.supervisor.dev_backends import EtcdProcess, RedisProcess
from inferfleet_cli.supervisor.options import ServicePlan
from inferfleet_proto.admin.v1 import fleet_pb2, fleet_pb2_grpc
from inferfleet_proto.internal.v1 import (
    engine_pb2,
    engine_pb2_grpc,
    prefix_index_pb2,
    prefix_index_pb2_grpc,
)
from services.common.rpc import TOKEN_KEY
from tests.chaos.proxy import Proxy

REPOSITORY = Path(__file__).resolve().parents[2]
START_LIMIT_S = 240.0
STALL_LIMIT_S = 3.0
RESTART_DELAY_S = 0.2
T = TypeVar("T")


@dataclass(frozen=True)
class Shape:
    """How many of each, and where their code comes from."""

    engines: int = 3
    balancers: int = 2
    gateways: int = 2
    model: Path = Path()
    settings: dict[str, dict[str, str]] = field(default_factory=dict)
    """More keys by kind of service ("engine") or by one's name ("engine-1")."""
    code: dict[str, Path] = field(default_factory=dict)
    """Where the code of a service lies, by name, if not in this tree."""
    new_keys: tuple[str, ...] = ()
    """Keys that the code of another tree does not know."""
    proxied: tuple[str, ...] = ()
    """Engines that others reach through a proxy only."""

    @property
    def names(self) -> list[str]:
        """Of all services, in starting order."""
        kinds = {"balancer": self.balancers, "engine": self.engines, "gateway": self.gateways}
        return ["kvcache", *(f"{k}-{i}" for k, n in kinds.items() for i in range(1, n + 1))]


class ChaosFleet:
    """Everything runs when `start` returns.

    Args:
        root: an empty directory for logs and data.
        say: gets one line at a time.
        etcd_keys: how services reach a cluster that somebody else runs; default: one of its own.
    """

    def __init__(
        self,
        shape: Shape,
        root: Path,
        say: Callable[[str], None],
        etcd_keys: dict[str, str] | None = None,
    ) -> None:
        self.shape = shape
        self.root = root
        self._say = say
        self._etcd_keys = etcd_keys
        # Children are tied to the thread that starts them: this one lives as long as the fleet.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stores")
        self.redis: RedisProcess
        self.etcd: EtcdProcess | None = None
        self.children: dict[str, Child] = {}
        self.addresses: dict[str, str] = {}
        self.proxies: dict[str, Proxy] = {}
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._admin: dict[str, int] = {}
        self._token = secrets.token_hex(16)

    async def start(self) -> None:
        """Return when every service is ready and every engine known to all balancers."""
        self.root.mkdir(parents=True, exist_ok=True)
        (self.root / "token").write_text(self._token)
        self.redis = await self.blocking(lambda: RedisProcess.start(self.root / "redis"))
        if self._etcd_keys is None:
            self.etcd = await self.blocking(lambda: EtcdProcess.start(self.root / "etcd"))
            self._etcd_keys = {"etcd": self.etcd.address}
        names = self.shape.names
        free = iter(ports.take(len(names)))
        self.addresses = {name: f"127.0.0.1:{next(free)}" for name in names}
        balancers = [name for name in names if name.startswith("balancer")]
        self._admin = dict(zip(balancers, ports.take(len(balancers)), strict=True))
        for name in self.shape.proxied:
            self.proxies[name] = Proxy(self.addresses[name])
            await self.proxies[name].start()
        for name in names:
            self.children[name] = self._child(name)
            await self.children[name].start()
        await asyncio.gather(*(child.wait_ready() for child in self.children.values()))
        await self.until(self.whole, "the fleet to be whole")

    async def stop(self) -> None:
        """End every process; idempotent."""
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()
        for child in self.children.values():
            child.kill()
        await asyncio.gather(*(child.stop(0) for child in self.children.values()))
        for proxy in self.proxies.values():
            await proxy.stop()
        await self.blocking(self._kill_stores)
        self._thread.shutdown()

    async def blocking(self, call: Callable[[], T]) -> T:
        """Run what starts, stops or asks a store in the stores' thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    def _kill_stores(self) -> None:
        for store in (getattr(self, "redis", None), self.etcd):
            if store is not None:
                store.kill()

    @property
    def gateways(self) -> list[str]:
        return [a for name, a in self.addresses.items() if name.startswith("gateway")]

    @property
    def engines(self) -> list[str]:
        return [name for name in self.addresses if name.startswith("engine")]

    @property
    def balancers(self) -> list[str]:
        return list(self._admin)

    def pid(self, name: str) -> int:
        """Of the process that runs now."""
        pid = self.children[name].status().pid
        assert pid is not None, f"{name} does not run"
        return pid

    def signal(self, name: str, signum: signal.Signals, *, group: bool = False) -> None:
        """Signal a service's process, or with `group` all processes that belong to it."""
        (os.killpg if group else os.kill)(self.pid(name), signum)

    def core_pid(self, engine: str) -> int:
        """Of the process that computes for an engine (Linux alone)."""
        parent = f"PPid:\t{self.pid(engine)}\n"
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it may end meanwhile
                if parent in (process / "status").read_text() and (
                    b"services.engine.core.process" in (process / "cmdline").read_bytes()
                ):
                    return int(process.name)
        raise RuntimeError(f"{engine} has no core")

    def ready(self, name: str) -> bool:
        return self.children[name].status().state == "ready"

    async def restart(self, name: str, code: Path | None = None) -> float:
        """SIGTERM, drain, and start again (with other code, if given); seconds until ready."""
        began = time.monotonic()
        old = self.children[name]
        await old.stop(150.0)
        if code is not None:
            self.shape.code[name] = code
        self.children[name] = self._child(name)
        await self.children[name].start()
        await self.children[name].wait_ready()
        return time.monotonic() - began

    async def load(self, engine: str) -> engine_pb2.LoadReport | None:
        """The engine's own report of this moment, None if it does not answer."""
        stub = engine_pb2_grpc.EngineStub(self._channel(self.addresses[engine]))
        call: Any = stub.WatchLoad(
            engine_pb2.WatchLoadRequest(), metadata=((TOKEN_KEY, self._token),), timeout=2.0
        )
        try:
            report = await call.read()
        except grpc.RpcError:
            return None
        finally:
            call.cancel()
        return report if isinstance(report, engine_pb2.LoadReport) else None

    async def seen_by(self, balancer: str) -> list[fleet_pb2.EngineView]:
        """The engines as that balancer sees them; empty if it does not answer."""
        stub = fleet_pb2_grpc.FleetStub(self._channel(f"127.0.0.1:{self._admin[balancer]}"))
        call: Any = stub.ListEngines(
            fleet_pb2.ListEnginesRequest(), metadata=((TOKEN_KEY, self._token),), timeout=2.0
        )
        try:
            reply = await call
        except grpc.RpcError:
            return []
        return list(reply.engines)

    async def index_stats(self) -> prefix_index_pb2.StatsResponse | None:
        """What the KV-cache service knows, None if it or Redis does not answer."""
        stub = prefix_index_pb2_grpc.PrefixIndexStub(self._channel(self.addresses["kvcache"]))
        call: Any = stub.Stats(
            prefix_index_pb2.StatsRequest(), metadata=((TOKEN_KEY, self._token),), timeout=2.0
        )
        try:
            reply: prefix_index_pb2.StatsResponse = await call
        except grpc.RpcError:
            return None
        return reply if reply.store_available else None

    async def running(self) -> int:
        """Requests that live engines have, running or waiting."""
        loads = await asyncio.gather(*(self.load(name) for name in self.engines))
        return sum(load.running_requests + load.waiting_requests for load in loads if load)

    async def healthy(self, name: str) -> bool:
        """Whether the service's health check answers SERVING within 2 s."""
        stub = health_pb2_grpc.HealthStub(self._channel(self.addresses[name]))
        call: Any = stub.Check(health_pb2.HealthCheckRequest(), timeout=2.0)
        try:
            reply = await call
        except grpc.RpcError:
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    async def whole(self) -> bool:
        """Every process ready and healthy, every engine serving according to every balancer."""
        if not all(self.ready(name) for name in self.children):
            return False
        healthy = await asyncio.gather(*(self.healthy(name) for name in self.children))
        views = await asyncio.gather(*(self.seen_by(name) for name in self.balancers))
        served = dict.fromkeys(self.engines, "serving")
        return all(healthy) and all({e.info.engine_id: e.state for e in v} == served for v in views)

    async def until(self, condition: Any, what: str, limit_s: float = START_LIMIT_S) -> float:
        """Wait until the coroutine function `condition` returns True; returns the seconds.

        Raises:
            TimeoutError: the condition did not hold within `limit_s`.
        """
        began = time.monotonic()
        while not await condition():
            if time.monotonic() - began > limit_s:
                raise TimeoutError(f"waited {limit_s:g} s in vain for {what}")
            await asyncio.sleep(0.02)
        return time.monotonic() - began

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            options = [
                ("grpc.max_reconnect_backoff_ms", 300),
                ("grpc.use_local_subchannel_pool", 1),
            ]
            self._channels[address] = grpc.aio.insecure_channel(address, options=options)
        return self._channels[address]

    def _child(self, name: str) -> Child:
        return Child(
            ServicePlan(name, self._argv(name)),
            log_file=self._new_log(name),
            ready_file=self.root / f"{name}.ready",
            cwd=self.shape.code.get(name, REPOSITORY),
            on_event=self._say,
            delay_s=lambda _: RESTART_DELAY_S,
        )

    def _new_log(self, name: str) -> Path:
        """A log of its own for each life that `restart` begins."""
        lives = len(list(self.root.glob(f"{name}.*.log")))
        return self.root / f"{name}.{lives + 1}.log"

    def _argv(self, name: str) -> tuple[str, ...]:
        kind = name.partition("-")[0]
        host, _, port = self.addresses[name].rpartition(":")
        keys = {
            "host": host,
            "port": port,
            "fleet_token_file": str(self.root / "token"),
            "ready_file": str(self.root / f"{name}.ready"),
            "drain_grace_s": "120",
            **self._keys_of(kind, name),
            **self.shape.settings.get(kind, {}),
            **self.shape.settings.get(name, {}),
        }
        if self.shape.code.get(name, REPOSITORY) != REPOSITORY:
            keys = {key: value for key, value in keys.items() if key not in self.shape.new_keys}
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in keys.items()]
        return (sys.executable, "-m", f"services.{kind}", *flags)

    def _keys_of(self, kind: str, name: str) -> dict[str, str]:
        etcd, index = dict(self._etcd_keys or {}), {"kvcache": self.addresses["kvcache"]}
        if kind == "kvcache":
            return {"redis": self.redis.url}
        if kind == "gateway":
            return {**etcd, "http_port": "0"}
        if kind == "balancer":
            return {
                **etcd,
                **index,
                "balancer_id": name,
                "admin_port": str(self._admin[name]),
                "stall_limit_s": f"{STALL_LIMIT_S:g}",
            }
        engine = {
            "engine_id": name,
            "model": str(self.shape.model),
            "served_name": "tiny",
            "deterministic": "true",
            "threads": "1",
            "warm_grammars": "true",
            "kv_memory": "48MiB",
            "block_size": "16",
            "max_num_seqs": "64",
            "max_num_batched_tokens": "256",
        }
        if name in self.proxies:
            engine["advertise"] = self.proxies[name].address
        return {**etcd, **index, **engine}
