"""Starts fleets, runs scenarios on them one after the other, and yields their rows."""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc

from inferfleet_cli.errors import CliError
from inferfleet_cli.supervisor.dev_backends import BackendError
from tests.chaos import engines, leaving, overload, services, stores, upgrade
from tests.chaos.client import Clients
from tests.chaos.etcd_cluster import EtcdCluster
from tests.chaos.fleet import ChaosFleet, Shape
from tests.chaos.scenario import Plan, Row, Scenario, Stage
from tests.chaos.workload import cases
from tests.doubles.tiny_model import TinyShape, write_tiny_model

# By the fleet that they need, and each fleet's in an order that costs least.
SETS: Mapping[str, Mapping[str, Scenario]] = {
    "main": {
        "engine-kill": engines.engine_kill,
        "engine-stop": engines.engine_stop,
        "core-stop": engines.core_stop,
        "engine-cut": engines.engine_cut,
        "engine-drain": engines.engine_drain,
        "balancer-kill": services.balancer_kill,
        "balancer-stop": services.balancer_stop,
        "gateway-kill": services.gateway_kill,
        "clients-leave": leaving.clients_leave,
        "kvcache-kill": services.kvcache_kill,
        "redis-down": stores.redis_down,
        "redis-absent": stores.redis_absent,
        "redis-stop": stores.redis_stop,
        "redis-slow": stores.redis_slow,
        "redis-password": stores.redis_password,
        "etcd-down": stores.etcd_down,
        "etcd-stop": stores.etcd_stop,
        "rolling": services.rolling_restart,
    },
    "cluster": {"etcd-leader": stores.etcd_leader},
    "small": {"overload": overload.overload, "slow-readers": overload.slow_readers},
    "mixed": {"upgrade": upgrade.upgrade},
}
SCENARIOS: Mapping[str, Scenario] = {n: s for kind in SETS.values() for n, s in kind.items()}
CASES = 20


@asynccontextmanager
async def stage(
    shape: Shape,
    plan: Plan,
    say: Callable[[str], None],
    keep: Path | None = None,
    *,
    clustered: bool = False,
) -> AsyncIterator[Stage]:
    """A whole fleet with clients that know the undisturbed answers.

    Args:
        keep: a directory for logs that outlives the run.
        clustered: with an etcd of three members and TLS.
    """
    async with AsyncExitStack() as stack:
        root = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
        model = write_tiny_model(
            root / "model", TinyShape(max_position=2048, num_layers=2, tie_embeddings=False)
        )
        cluster = None
        if clustered:
            cluster = EtcdCluster(root / "etcd")
            stack.callback(cluster.stop)
            await asyncio.to_thread(cluster.start)
        fleet = ChaosFleet(
            replace(shape, model=model), root, say, cluster.keys if cluster else None
        )
        stack.push_async_callback(fleet.stop)
        began = time.monotonic()
        await fleet.start()
        clients = Clients(fleet.gateways)
        stack.push_async_callback(clients.close)
        made = Stage(fleet, clients, cases(CASES, plan.tokens), plan, say, cluster)
        await fleet.until(clients.served, "both gateways to serve")
        await clients.learn(made.cases)
        say(f"fleet whole and answers known after {time.monotonic() - began:.1f} s")
        yield made


async def run(made: Stage, names: Sequence[str]) -> AsyncIterator[Row]:
    """Run the scenarios in order; one that fails yields a row with a violation and ends the run."""
    for name in names:
        made.say(f"{name}: {(SCENARIOS[name].__doc__ or '').strip().splitlines()[0]}")
        try:
            for row in await SCENARIOS[name](made):
                yield row
        except (TimeoutError, grpc.RpcError) as error:
            row = Row(name, counts=made.clients.counts)
            row.violations.append(f"{type(error).__name__}: {error}")
            yield row
            return  # scenarios on a fleet that has not recovered would be meaningless


async def run_all(
    names: Sequence[str],
    num_engines: int,
    plan: Plan,
    say: Callable[[str], None],
    keep: Path | None,
) -> AsyncIterator[Row]:
    """The named scenarios, each on a fleet of its kind."""
    for kind, scenarios in SETS.items():
        chosen = [name for name in scenarios if name in names]
        if not chosen:
            continue
        with tempfile.TemporaryDirectory(prefix="chaos-old-") as scratch:
            try:
                shape = _shape(kind, num_engines, Path(scratch))
                logs = keep / kind if keep else None
                async with stage(shape, plan, say, logs, clustered=kind == "cluster") as made:
                    async for row in run(made, chosen):
                        yield row
            except upgrade.NoSuchRevisionError as error:
                yield Row("version n beside n-1", violations=[f"not run: {error}"])
            except (TimeoutError, BackendError, CliError, grpc.RpcError) as error:
                yield Row(f"fleet {kind!r}", violations=[f"{type(error).__name__}: {error}"])


def _shape(kind: str, num_engines: int, scratch: Path) -> Shape:
    if kind == "main":
        return Shape(engines=num_engines, proxied=(f"engine-{num_engines}",))
    if kind == "small":
        return Shape(engines=2, settings=overload.SETTINGS)
    if kind == "mixed":
        old = upgrade.unpack(upgrade.PREVIOUS, scratch)
        shape = Shape(engines=2, new_keys=upgrade.NEW_KEYS, settings=upgrade.SETTINGS)
        return replace(shape, code=dict.fromkeys(shape.names, old))
    return Shape(engines=2)
