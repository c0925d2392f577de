"""Starts a fleet, runs scenarios on it one after the other, and hands back their rows."""

import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc

from benchmarks.chaos import engines, middle, stores
from benchmarks.chaos.client import Clients
from benchmarks.chaos.fleet import ChaosFleet, Shape
from benchmarks.chaos.scenario import Plan, Row, Scenario, Stage
from benchmarks.chaos.workload import cases
from services.engine.loader.tiny_model import TinyShape, write_tiny_model

SCENARIOS: Mapping[str, Scenario] = {
    "engine-kill": engines.engine_kill,
    "engine-stop": engines.engine_stop,
    "engine-cut": engines.engine_cut,
    "engine-drain": engines.engine_drain,
    "balancer-kill": middle.balancer_kill,
    "balancer-stop": middle.balancer_stop,
    "gateway-kill": middle.gateway_kill,
    "kvcache-kill": middle.kvcache_kill,
    "redis-down": stores.redis_down,
    "redis-stop": stores.redis_stop,
    "redis-slow": stores.redis_slow,
    "redis-password": stores.redis_password,
    "etcd-down": stores.etcd_down,
    "etcd-stop": stores.etcd_stop,
    "rolling": middle.rolling_restart,
}
CASES = 20
TOKENS = 240


@asynccontextmanager
async def stage(
    shape: Shape, plan: Plan, say: Callable[[str], None], keep: Path | None = None
) -> AsyncIterator[Stage]:
    """A whole fleet with clients that know the undisturbed answers.

    Args:
        keep: a directory for logs that outlives the run.
    """
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        root = keep or Path(scratch)
        model = write_tiny_model(
            root / "model", TinyShape(max_position=2048, num_layers=2, tie_embeddings=False)
        )
        fleet = ChaosFleet(replace(shape, model=model), root, say)
        clients: Clients | None = None
        try:
            began = time.monotonic()
            await fleet.start()
            clients = Clients(fleet.gateways)
            made = Stage(fleet, clients, cases(CASES, TOKENS), plan, say)
            await fleet.until(clients.served, "both gateways to serve")
            await clients.learn(made.cases)
            say(f"fleet whole and answers known after {time.monotonic() - began:.1f} s")
            yield made
        finally:
            if clients is not None:
                await clients.close()
            await fleet.stop()


async def run(made: Stage, names: Sequence[str]) -> list[Row]:
    """The named scenarios in order; one that breaks is a row with a violation."""
    rows = []
    for name in names:
        made.say(f"{name}: {(SCENARIOS[name].__doc__ or '').strip().splitlines()[0]}")
        try:
            rows.extend(await SCENARIOS[name](made))
        except (TimeoutError, grpc.RpcError) as error:
            row = Row(name, counts=made.clients.counts)
            row.violations.append(f"{type(error).__name__}: {error}")
            rows.append(row)
            return rows  # what runs after a fleet that does not heal says nothing
    return rows
