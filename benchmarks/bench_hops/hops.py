"""The hops that are measured, each a process of its own whose CPU can be read apart."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import uvloop
from google.protobuf import json_format
from opentelemetry.sdk.trace import TracerProvider

from benchmarks.bench_hops.sources import StreamingEngine
from inferfleet_cli.supervisor.dev_backends import free_port, tied_to_parent
from services.balancer.config import BalancerConfig
from services.balancer.service import BalancerService
from services.common.etcd.registry import ENGINES_PREFIX
from services.common.service.telemetry import Telemetry

READY_S = 60
_TICKS = os.sysconf("SC_CLK_TCK")


class Hop:
    """A running process with an address, and one of its HTTP face if it has that beside it."""

    def __init__(
        self, name: str, process: "subprocess.Popen[str]", address: str, http: str = ""
    ) -> None:
        self.name, self.process, self.address, self.http = name, process, address, http

    @property
    def cpu_s(self) -> float:
        """Seconds of CPU that it and its children have used."""
        return sum(_cpu_s(pid) for pid in _family(self.process.pid))


@contextlib.contextmanager
def role(name: str, *flags: str) -> Iterator[Hop]:
    """One of our own roles; it prints its address first."""
    command = [sys.executable, "-m", "benchmarks.bench_hops", "--role", name, *flags]
    process = subprocess.Popen(tied_to_parent(command), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield Hop(name, process, process.stdout.readline().strip())
    finally:
        _end(process)


@contextlib.contextmanager
def gateway(engine: str, balancer: str) -> Iterator[Hop]:
    """The real service, with a fixed engine and a fixed balancer."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready.json"
        flags = {"engines": engine, "balancers": balancer, "ready-file": str(ready)}
        flags |= {"port": "0", "http-port": "0", "log-level": "warning"}
        command = [sys.executable, "-m", "services.gateway"]
        command += [part for key, value in flags.items() for part in (f"--{key}", value)]
        process = subprocess.Popen(tied_to_parent(command), text=True)
        try:
            _wait(ready.exists, process)
            record = json.loads(ready.read_text())
            yield Hop("gateway", process, record["address"], record["http_address"])
        finally:
            _end(process)


@contextlib.contextmanager
def peer(name: str, command: list[str], port: int) -> Iterator[Hop]:
    """Another project's router, once it answers."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(tied_to_parent(command), stdout=log, stderr=log, text=True)
        try:
            _wait(lambda: _answers(port), process)
            time.sleep(2)  # it looks for its workers after it listens
            yield Hop(name, process, f"127.0.0.1:{port}")
        except RuntimeError as error:
            log.seek(0)
            raise RuntimeError(f"{name}: {error}: {log.read()[-1500:].decode()}") from error
        finally:
            _end(process)


def peer_commands(folder: Path, worker: str) -> dict[str, tuple[list[str], int]]:
    """How the routers in an environment of their own are started, and where they will listen."""
    python, found = folder / "bin" / "python", {}
    for name, package in (("sglang-router", "sglang_router"), ("smg", "smg")):
        if not next(folder.glob(f"lib/python3*/site-packages/{package}"), None):
            continue
        port = free_port()
        flags = {"worker-urls": f"http://{worker}", "host": "127.0.0.1", "port": str(port)}
        flags |= {"policy": "round_robin", "prometheus-port": str(free_port()), "log-level": "warn"}
        command = [str(python), "-m", f"{package}.launch_router"]
        command += [part for key, value in flags.items() for part in (f"--{key}", value)]
        found[name] = (command, port)
    return found


async def serve_balancer(engine: str) -> None:
    """Print the real balancer's address and serve."""
    service = BalancerService(
        BalancerConfig(), Telemetry(TracerProvider()), _OneEngine(StreamingEngine(engine).info)
    )
    await service.start()
    print(service.address, flush=True)
    await asyncio.Event().wait()


async def serve_plain(engine: str) -> None:
    """Print the address of the least that grpc.aio can do between two: bytes in, bytes out."""
    server = grpc.aio.server()
    channel = grpc.aio.insecure_channel(engine)
    method = channel.unary_stream("/inferfleet.internal.v1.Engine/Run")

    async def run(request: bytes, context: Any) -> Any:
        async for message in method(request):
            yield message

    handlers = {"Run": grpc.unary_stream_rpc_method_handler(run)}
    service = grpc.method_handlers_generic_handler("inferfleet.internal.v1.Engine", handlers)
    server.add_generic_rpc_handlers((service,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await asyncio.Event().wait()


def run(name: str, engine: str) -> None:
    """The process of one of our roles."""
    uvloop.run(serve_balancer(engine) if name == "balancer" else serve_plain(engine))


class _OneEngine:
    """A registry that holds one engine for ever."""

    connected = True

    def __init__(self, info: Any) -> None:
        self._items = {ENGINES_PREFIX + info.engine_id: json_format.MessageToJson(info).encode()}

    def snapshot(self) -> dict[str, bytes]:
        return self._items

    async def wait_change(self, version: int) -> int:
        await asyncio.Event().wait()
        return version


def _wait(ready: Any, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + READY_S
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("it did not start")
        time.sleep(0.05)


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1.0):
            return True
    except OSError:
        return False


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()


def _family(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            yield from _family(int(child))


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS
