"""Goodput beyond capacity: a real balancer over gRPC before simulated engines of known capacity.

    python -m benchmarks.bench_overload --json out.json

Requests arrive at random times at multiples of what the engines can do; each has a deadline and is
worth nothing after it. Prints what was answered in time per second, beside the peak, and what
became of the rest. Half of the callers' tenants share the load evenly, one sends most of it.
"""

import argparse
import asyncio
import json
import platform
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from random import Random
from typing import Any

import grpc
from opentelemetry.sdk.trace import TracerProvider

from inferfleet.internal.v1 import engine_pb2, engine_pb2_grpc
from inferfleet.v1 import inference_pb2
from services.balancer.config import BalancerConfig
from services.balancer.engine_view import EngineState
from services.balancer.server import BalancerService
from services.balancer.testing import MODEL, FakeEngine, FakeKeys, stream_of
from services.common import errors
from services.common.telemetry import Telemetry

TENANTS = ("flood", "flood", "flood", "calm", "quiet")


@dataclass(frozen=True)
class Plan:
    """What is served and asked."""

    engines: int = 2
    seats: int = 8
    service_s: float = 1.0
    """Of one request, once it runs."""
    deadline_s: float = 4.0
    seconds: float = 15.0
    """Of arrivals, at each load."""
    seed: int = 0

    @property
    def capacity(self) -> float:
        """Requests a second."""
        return self.engines * self.seats / self.service_s


@dataclass(frozen=True)
class Outcome:
    """One load."""

    load: float
    asked: int
    good: int
    """Answered to the end before the deadline."""
    goodput: float
    """Of those, a second of arrivals."""
    ends: dict[str, int]
    by_tenant: dict[str, tuple[int, int]]
    """Answered in time and asked."""
    without_hint: int
    """Refused for want of room without a RetryInfo."""
    started: int
    """Requests that an engine began."""
    expired_at_engine: int
    """Not begun: the deadline passed while they waited for a seat at the engine."""
    seconds: float


class SeatedEngine(FakeEngine):
    """Runs `seats` requests at once, each for `service_s`; the others wait."""

    def __init__(self, engine_id: str, plan: Plan) -> None:
        super().__init__(engine_id, max_num_seqs=plan.seats)
        self._plan = plan
        self._seats = asyncio.Semaphore(plan.seats)
        self.waiting = 0
        self.started = 0
        self.expired = 0

    async def Run(self, request: engine_pb2.EngineRequest, context: Any) -> AsyncIterator[Any]:
        """Wait for a seat, then stream at a steady pace."""
        self.waiting += 1
        self._tell()
        try:
            await self._seats.acquire()
        finally:
            self.waiting -= 1
        left_s = context.time_remaining()
        if left_s is not None and left_s <= 0:
            self.expired += 1
            self._seats.release()
            return
        self.running += 1
        self.started += 1
        messages = list(stream_of(request, self.info))
        try:
            for message in messages:
                yield message
                await asyncio.sleep(self._plan.service_s / len(messages))
        finally:
            self.running -= 1
            self._seats.release()
            self._tell()

    def _tell(self) -> None:
        self.load.waiting_requests = self.waiting
        self.load.running_requests = self.running
        self.report_now()


async def measure(plan: Plan, loads: Sequence[float]) -> list[Outcome]:
    """All loads, one after the other, on one balancer that is never restarted."""
    keys = FakeKeys()
    engines = [SeatedEngine(f"engine-{number}", plan) for number in range(plan.engines)]
    quiet = Telemetry(TracerProvider(shutdown_on_exit=False))
    config = BalancerConfig(engine_headroom=2, queue_size=256, log_level="error")
    service = BalancerService(config, quiet, keys)
    await service.start()
    try:
        for engine in engines:
            await engine.start()
            await keys.register(engine)
        await _all_serve(service, plan.engines)
        async with grpc.aio.insecure_channel(service.address) as channel:
            stub = engine_pb2_grpc.EngineStub(channel)
            return [await _load(plan, load, stub, engines) for load in loads]
    finally:
        await service.stop()
        for engine in engines:
            await engine.stop()


async def _all_serve(service: BalancerService, count: int) -> None:
    assert service.rooms is not None
    views = service.rooms.registry.views
    async with asyncio.timeout(30):
        while sum(view.state is EngineState.SERVING for view in views(MODEL)) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # another room's state: no event tells of it


async def _load(plan: Plan, load: float, stub: Any, engines: Sequence[SeatedEngine]) -> Outcome:
    before = sum(e.started for e in engines), sum(e.expired for e in engines)
    rng = Random(plan.seed)
    began, at = time.monotonic(), 0.0
    calls: list[asyncio.Task[tuple[str, str, bool]]] = []
    while at < plan.seconds:
        await asyncio.sleep(max(began + at - time.monotonic(), 0))
        tenant = rng.choice(TENANTS)
        name = f"{load}-{len(calls)}"
        calls.append(asyncio.create_task(_call(stub, name, tenant, plan.deadline_s)))
        at += rng.expovariate(plan.capacity * load)
    ends = await asyncio.gather(*calls)
    asked, good = Counter(t for t, _, _ in ends), Counter(t for t, end, _ in ends if end == "OK")
    seconds = time.monotonic() - began
    return Outcome(
        load=load,
        asked=len(ends),
        good=good.total(),
        goodput=round(good.total() / plan.seconds, 2),
        ends=dict(Counter(end for _, end, _ in ends)),
        by_tenant={tenant: (good[tenant], asked[tenant]) for tenant in sorted(asked)},
        without_hint=sum(end == "RESOURCE_EXHAUSTED" and not hint for _, end, hint in ends),
        started=sum(e.started for e in engines) - before[0],
        expired_at_engine=sum(e.expired for e in engines) - before[1],
        seconds=round(seconds, 2),
    )


async def _call(stub: Any, name: str, tenant: str, deadline_s: float) -> tuple[str, str, bool]:
    request = engine_pb2.EngineRequest(
        tenant=tenant,
        request=inference_pb2.GenerateRequest(
            model=MODEL,
            request_id=name,
            token_ids=inference_pb2.TokenIds(ids=range(8)),
            stop=inference_pb2.StopParams(max_tokens=4),
        ),
    )
    try:
        async for _ in stub.Run(request, timeout=deadline_s):
            pass
    except grpc.RpcError as error:
        told = errors.error_of(error)
        return tenant, told.code.name, bool(told.retry_after_s)
    return tenant, "OK", False


def main() -> None:
    """Print a table; write all of it with --json."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_overload",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--loads", default="0.5,0.8,1,1.5,2,3", help="multiples of the capacity")
    parser.add_argument("--seconds", type=float, default=Plan.seconds, help="at each load")
    parser.add_argument("--engines", type=int, default=Plan.engines)
    parser.add_argument("--deadline", type=float, default=Plan.deadline_s, help="seconds")
    parser.add_argument("--json", type=Path, help="write all figures there")
    args = parser.parse_args()
    plan = Plan(engines=args.engines, seconds=args.seconds, deadline_s=args.deadline)
    loads = [float(part) for part in args.loads.split(",")]
    outcomes = asyncio.run(measure(plan, loads))
    peak = max(o.goodput for o in outcomes)
    print(f"capacity {plan.capacity:.0f} requests/s; deadline {plan.deadline_s:g} s")
    print(f"{'load':>5} {'goodput':>8} {'of peak':>8}  ends, started")
    for o in outcomes:
        ends = ", ".join(f"{count} {end}" for end, count in sorted(o.ends.items()))
        print(f"{o.load:5g} {o.goodput:8.1f} {o.goodput / peak:8.1%}  {ends}; {o.started} started")
    if args.json is not None:
        record = {
            "date": date.today().isoformat(),
            "machine": f"{platform.machine()}, Python {platform.python_version()}",
            "command": "python -m benchmarks.bench_overload",
            "plan": asdict(plan),
            "results": [asdict(outcome) for outcome in outcomes],
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
