"""The supervisor: starts and stops all processes of a local fleet."""

import asyncio
import dataclasses
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from inferfleet_cli.supervisor import ports, tls
from inferfleet_cli.supervisor.child import Child, ChildStatus
from inferfleet_cli.supervisor.control import ControlServer
from inferfleet_cli.supervisor.engine_list import list_engines
from inferfleet_cli.supervisor.health import with_health
from inferfleet_cli.supervisor.options import (
    REPOSITORY,
    Addresses,
    Options,
    Planner,
    plan,
    standby_file,
)
from inferfleet_cli.supervisor.otlp_receiver import OtlpReceiver
from inferfleet_cli.supervisor.spares import Spares
from inferfleet_cli.supervisor.state_dir import StateDir
from inferfleet_cli.supervisor.stores import Store, make_stores
from inferfleet_cli.supervisor.trace_json import trace_json
from inferfleet_cli.supervisor.trace_store import TraceStore

HOST = "127.0.0.1"
STOP_MARGIN_S = 5.0
STILL_STARTING_EVERY_S = 20.0


class Fleet:
    """Owns the processes, the state directory and the traces of one fleet."""

    def __init__(
        self, options: Options, say: Callable[[str], None], planner: Planner = plan
    ) -> None:
        """`say` is called with lines of progress; `planner` decides which processes to run."""
        self.options = options
        self._planner = planner
        self.traces = TraceStore()
        self._say = say
        self._state = StateDir(options.state_dir)
        self._otlp = OtlpReceiver(self.traces)
        self._control: ControlServer | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stores")
        self._stores: list[Store] = []
        self._children: list[Child] = []
        self._spares: Spares | None = None
        self._following: asyncio.Task[None] | None = None
        self._started = time.time()
        self.addresses: Addresses | None = None
        self.tls = tls.gateway_files(options)
        self._balancer_tls = tls.balancer_files(options)

    @property
    def http_url(self) -> str:
        """URL of the first gateway's HTTP port; "" before the start."""
        scheme = "https" if self.tls.used else "http"
        return f"{scheme}://{self.addresses.http}" if self.addresses else ""

    def claim(self) -> None:
        """Claim the state directory. `start` does it too; call this to fail before any output.

        Raises:
            CliError: another fleet uses the directory, or it cannot be written.
        """
        self._state.claim()

    async def start(self) -> Addresses:
        """Start all processes and wait until the fleet serves.

        Raises:
            CliError: a process did not start; call `stop` to end the others.
        """
        self.claim()
        at = await self._choose_addresses()
        self.addresses = at
        self._control = ControlServer(
            self._state.token(), {"status": self._on_status, "trace": self._on_trace}
        )
        control_port = await self._control.start()
        await self._start_stores(at)
        await self._start_services(at)
        self._state.write_record(self._record(at, control_port))
        return at

    async def stop(self) -> None:
        """Drain and stop all processes, gateway first; idempotent and safe after a failed start."""
        if self._following is not None:  # an engine that stops is not to be replaced
            self._following.cancel()
            await asyncio.wait({self._following})
        grace_s = self.options.grace_s + STOP_MARGIN_S
        for group in _stop_order(self._children):
            await asyncio.gather(*(child.stop(grace_s) for child in group))
        for store in self._stores:
            await store.stop()
        self._children, self._stores = [], []
        await self._otlp.stop()
        if self._control is not None:
            await self._control.stop()
        self._thread.shutdown(wait=False)
        self._state.release()

    def kill(self) -> None:
        """Kill all processes at once, without a drain."""
        for child in self._children:
            child.kill()
        for store in self._stores:
            store.kill()

    def status(self) -> dict[str, Any]:
        """The processes that run, as the supervisor knows them; no service is called."""
        statuses = [store.status() for store in self._stores]
        statuses += [self._status_of(child) for child in self._children]
        at = self.addresses
        return {
            "running": True,
            "state_dir": str(self._state.root),
            "supervisor_pid": os.getpid(),
            "uptime_s": round(time.time() - self._started, 3),
            "gateway": {"grpc": at.gateway, "http": self.http_url} if at else {},
            "services": [dataclasses.asdict(status) for status in statuses],
            "traces": len(self.traces),
        }

    def _status_of(self, child: Child) -> ChildStatus:
        status = child.status()
        spare = self._spares is not None and self._spares.is_spare(child.name)
        return (
            dataclasses.replace(status, state="spare")
            if spare and status.state == "ready"
            else status
        )

    async def _choose_addresses(self) -> Addresses:
        options = self.options
        gateways = self._gateway_ports()
        (port, http), *more = gateways
        more_balancers = options.balancers - 1
        taken = {port for pair in gateways for port in pair}
        free = iter(ports.take(5 + options.engine_processes + 2 * more_balancers, avoid=taken))
        redis, etcd, kvcache, balancer, admin = (f"{HOST}:{next(free)}" for _ in range(5))
        return Addresses(
            gateway=f"{HOST}:{port}",
            http=f"{HOST}:{http}",
            more_gateways=tuple((f"{HOST}:{grpc}", f"{HOST}:{http}") for grpc, http in more),
            more_balancers=tuple(
                (f"{HOST}:{next(free)}", f"{HOST}:{next(free)}") for _ in range(more_balancers)
            ),
            redis=redis,
            etcd=etcd,
            store_password_file=str(self._state.store_password_file),
            kvcache=kvcache,
            balancer=balancer,
            admin=admin,
            engines=tuple(f"{HOST}:{one}" for one in free),
            otlp=await self._otlp.start(f"{HOST}:0"),
        )

    def _gateway_ports(self) -> list[tuple[int, int]]:
        """gRPC and HTTP port of each gateway: the requested ones, then the next free ones."""
        found: list[tuple[int, int]] = []
        taken: set[int] = set()
        for index in range(self.options.gateways):
            pair = []
            for what, first in (("gRPC", self.options.port), ("HTTP", self.options.http_port)):
                chosen = ports.next_free(first, avoid=taken)
                taken.add(chosen)
                pair.append(chosen)
                if index == 0:
                    self._report_port(what, first, chosen)
            found.append((pair[0], pair[1]))
        return found

    def _report_port(self, what: str, requested: int, chosen: int) -> int:
        if requested not in (0, chosen):
            self._say(f"Port {requested} ({what}) is taken: using {chosen}")
        return chosen

    async def _start_stores(self, at: Addresses) -> None:
        chosen = (
            _port(at.redis) if self.options.own_redis else None,
            _port(at.etcd) if self.options.own_etcd else None,
        )
        self._stores = make_stores(self._state, chosen, self._thread, self._say)
        for store in self._stores:
            seconds = await store.start()
            self._say(_ready_line(store.name, seconds, store.status().address, store.note))

    async def _start_services(self, at: Addresses) -> None:
        options = self.options
        ready = {name: self._state.ready_file(name) for name in options.names}
        for service in self._planner(self.options, at, self._state.token_file, ready):
            child = Child(
                service,
                log_file=self._state.log_file(service.name),
                ready_file=ready[service.name],
                cwd=REPOSITORY,
                on_event=self._say,
            )
            self._children.append(child)
            await child.start()
        if options.spare_engines:
            engines = [child for child in self._children if child.name.startswith("engine-")]
            files = {child.name: standby_file(ready[child.name]) for child in engines}
            self._spares = Spares(engines, files, options.engines, self._say)
        waits = [asyncio.create_task(self._report_when_ready(child)) for child in self._children]
        try:
            await asyncio.gather(*waits)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.wait(waits)
        if self._spares is not None:
            self._following = asyncio.create_task(self._spares.follow(), name="spares")

    async def _report_when_ready(self, child: Child) -> None:
        task = asyncio.ensure_future(child.wait_ready())
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=STILL_STARTING_EVERY_S)
                if not task.done():
                    log = self._state.log_file(child.name)
                    self._say(f"  {child.name:<10} still starting … (log: {log})")
        finally:
            task.cancel()
        self._say(_ready_line(child.name, task.result(), child.status().address, ""))

    def _record(self, at: Addresses, control_port: int) -> dict[str, Any]:
        return {
            "supervisor_pid": os.getpid(),
            "control_port": control_port,
            "gateway": at.gateway,
            "http": self.http_url,
            "tls": self.tls.to_json(),
            "otlp": f"http://{at.otlp}",
            "admin": at.admin,
            "etcd": self.options.etcd_endpoints(at.etcd),
            "redis": self.options.redis_url(at.redis),
            "store_password_file": at.store_password_file if self.options.own_etcd else "",
        }

    async def _on_status(self, _: dict[str, Any]) -> dict[str, Any]:
        admin = self.addresses.admin if self.addresses else ""
        engines, services = await asyncio.gather(
            list_engines(admin, self._state.token(), self._balancer_tls),
            with_health(self.status()["services"]),
        )
        return {**self.status(), "services": services, **engines}

    async def _on_trace(self, request: dict[str, Any]) -> dict[str, Any]:
        key = str(request.get("request_id", ""))
        spans = self.traces.find(key)
        if not spans:
            return {
                "error": f"no trace of {key}: only the traces of recent requests are kept, and a"
                " trace arrives shortly after its request"
            }
        return trace_json(spans)


def _stop_order(children: list[Child]) -> list[list[Child]]:
    """The groups of children in stopping order: what accepts requests stops first."""
    by_kind: dict[str, list[Child]] = {}
    for child in children:
        by_kind.setdefault(child.name.partition("-")[0], []).append(child)
    return [by_kind[k] for k in ("gateway", "balancer", "engine", "kvcache") if k in by_kind]


def _ready_line(name: str, seconds: float, address: str, note: str) -> str:
    return f"  {name:<10} ready in {seconds:5.1f} s   {address:<22}{note}".rstrip()


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])
