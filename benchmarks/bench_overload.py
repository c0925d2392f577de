"""Goodput beyond capacity, of a real balancer in front of simulated engines of known capacity.

    python -m benchmarks.bench_overload --json out.json

Requests arrive at random times, at multiples of the capacity; each has a deadline. The benchmark
prints the requests per second that were answered in time while the queues were full, their ratio to
the peak, and how the other requests ended. One of the three tenants sends most of the load. The
loads take turns, so that other work on the machine affects all of them; the result is the median
over the rounds of the ratio to the peak.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from math import exp
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

import grpc
from opentelemetry.sdk.trace import TracerProvider

from inferfleet_proto.internal.v1 import engine_pb2, engine_pb2_grpc
from inferfleet_proto.v1 import inference_pb2
from services.balancer.config import BalancerConfig
from services.balancer.engines.engine_view import EngineState
from services.balancer.service import BalancerService
from services.common import errors
from services.common.service.telemetry import Telemetry
from tests.doubles.fake_engine import MODEL, FakeEngine
from tests.doubles.registry import FakeRegistry
from tests.doubles.scripts import stream_of

TENANTS = ("flood", "flood", "flood", "calm", "quiet")


@dataclass(frozen=True)
class Plan:
    """The simulated engines and the load."""

    engines: int = 2
    slots: int = 8
    service_s: float = 1.0
    """Of one request, once it runs; the median, if they differ."""
    spread: float = 0.0
    """Of the service times' logarithms: their standard deviation."""
    deadline_s: float = 4.0
    seconds: float = 16.0
    """Of arrivals, at each load of each round."""
    rounds: int = 3
    seed: int = 0

    @property
    def capacity(self) -> float:
        """Requests a second."""
        return self.engines * self.slots / (self.service_s * exp(self.spread**2 / 2))

    @property
    def warm_s(self) -> float:
        """After the first arrival; then queues are as long as they get."""
        return min(self.deadline_s, self.seconds / 2)


@dataclass(frozen=True)
class Outcome:
    """One load of one round."""

    number: int
    """Of the round."""
    load: float
    sent: int
    """Requests."""
    good: int
    """Answered to the end before the deadline."""
    goodput: float
    """Of those a second, from `warm_s` to the last arrival."""
    ends: dict[str, int]
    by_tenant: dict[str, tuple[int, int]]
    """(answered in time, sent) by tenant."""
    without_hint: int
    """Refused for want of room without a RetryInfo."""
    started: int
    """Requests that an engine began."""
    expired_at_engine: int
    """Not begun: the deadline passed while they waited for a slot at the engine."""
    seconds: float


class SlotEngine(FakeEngine):
    """Runs `slots` requests at once, each for `service_s`; the others wait."""

    def __init__(self, engine_id: str, plan: Plan) -> None:
        super().__init__(engine_id, max_num_seqs=plan.slots)
        self._plan = plan
        self._slots = asyncio.Semaphore(plan.slots)
        self._rng = Random(plan.seed)
        self.waiting = 0
        self.started = 0
        self.expired = 0

    async def Run(self, request: engine_pb2.EngineRequest, context: Any) -> AsyncIterator[Any]:
        """Wait for a slot, then stream at a steady pace."""
        self.waiting += 1
        self._report_load()
        try:
            await self._slots.acquire()
        finally:
            self.waiting -= 1
        left_s = context.time_remaining()
        if left_s is not None and left_s <= 0:
            self.expired += 1
            self._slots.release()
            return
        self.running += 1
        self.started += 1
        messages = list(stream_of(request, self.info))
        service_s = self._plan.service_s * self._rng.lognormvariate(0.0, self._plan.spread)
        try:
            for message in messages:
                yield message
                await asyncio.sleep(service_s / len(messages))
        finally:
            self.running -= 1
            self._slots.release()
            self._report_load()

    def _report_load(self) -> None:
        self.load.waiting_requests = self.waiting
        self.load.running_requests = self.running
        self.report_now()


async def measure(plan: Plan, loads: Sequence[float]) -> list[Outcome]:
    """All loads in turn, so many rounds, on one balancer that is never restarted."""
    keys = FakeRegistry()
    engines = [SlotEngine(f"engine-{number}", plan) for number in range(plan.engines)]
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
            return [
                await _load(plan, number, load, stub, engines)
                for number in range(plan.rounds)
                for load in loads
            ]
    finally:
        await service.stop()
        for engine in engines:
            await engine.stop()


async def _all_serve(service: BalancerService, count: int) -> None:
    assert service.dependencies is not None
    views = service.dependencies.registry.views
    async with asyncio.timeout(30):
        while sum(view.state is EngineState.SERVING for view in views(MODEL)) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # no event reports the state of an engine


async def _load(
    plan: Plan, number: int, load: float, stub: Any, engines: Sequence[SlotEngine]
) -> Outcome:
    before = sum(e.started for e in engines), sum(e.expired for e in engines)
    rng = Random(plan.seed + number)
    began, at = time.monotonic(), 0.0
    calls: list[asyncio.Task[Answer]] = []
    while at < plan.seconds:
        await asyncio.sleep(max(began + at - time.monotonic(), 0))
        tenant = rng.choice(TENANTS)
        name = f"{number}-{load}-{len(calls)}"
        calls.append(asyncio.create_task(_call(stub, name, tenant, plan.deadline_s)))
        at += rng.expovariate(plan.capacity * load)
    ends = await asyncio.gather(*calls)
    sent = Counter(answer.tenant for answer in ends)
    answered = [answer for answer in ends if answer.end == "OK"]
    good = Counter(answer.tenant for answer in answered)
    seconds = time.monotonic() - began
    counted = [a for a in answered if plan.warm_s <= a.at - began < plan.seconds]
    return Outcome(
        number=number,
        load=load,
        sent=len(ends),
        good=good.total(),
        goodput=round(len(counted) / (plan.seconds - plan.warm_s), 2),
        ends=dict(Counter(answer.end for answer in ends)),
        by_tenant={tenant: (good[tenant], sent[tenant]) for tenant in sorted(sent)},
        without_hint=sum(a.end == "RESOURCE_EXHAUSTED" and not a.hint for a in ends),
        started=sum(e.started for e in engines) - before[0],
        expired_at_engine=sum(e.expired for e in engines) - before[1],
        seconds=round(seconds, 2),
    )


class Answer(NamedTuple):
    """How one request ended."""

    tenant: str
    end: str
    """"OK" or the name of the status."""
    hint: bool
    """Whether the error had a retry hint."""
    at: float
    """Time of the end, of time.monotonic()."""


async def _call(stub: Any, name: str, tenant: str, deadline_s: float) -> Answer:
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
        failure = errors.error_of(error)
        return Answer(tenant, failure.code.name, bool(failure.retry_after_s), time.monotonic())
    return Answer(tenant, "OK", False, time.monotonic())


def ratios(outcomes: Sequence[Outcome]) -> dict[float, float]:
    """Goodput of each load beside its round's best: the median of the rounds."""
    peaks: dict[int, float] = {}
    for o in outcomes:
        peaks[o.number] = max(peaks.get(o.number, 0.0), o.goodput)
    return {
        load: median(o.goodput / (peaks[o.number] or 1.0) for o in outcomes if o.load == load)
        for load in sorted({o.load for o in outcomes})
    }


def main() -> None:
    """Print a table; write all of it with --json."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_overload",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--loads", default="0.8,1,1.5,3", help="multiples of the capacity")
    parser.add_argument("--rounds", type=int, default=Plan.rounds, help="of all loads in turn")
    parser.add_argument("--seconds", type=float, default=Plan.seconds, help="at each load")
    parser.add_argument("--engines", type=int, default=Plan.engines)
    parser.add_argument("--deadline", type=float, default=Plan.deadline_s, help="seconds")
    parser.add_argument(
        "--spread", type=float, default=Plan.spread, help="of service times, as of logarithms"
    )
    parser.add_argument("--json", type=Path, help="write all figures there")
    args = parser.parse_args()
    plan = Plan(
        engines=args.engines,
        seconds=args.seconds,
        deadline_s=args.deadline,
        rounds=args.rounds,
        spread=args.spread,
    )
    loads = [float(part) for part in args.loads.split(",")]
    load_before = os.getloadavg()
    outcomes = asyncio.run(measure(plan, loads))
    of_peak = ratios(outcomes)
    print(f"capacity {plan.capacity:.1f} requests/s; deadline {plan.deadline_s:g} s")
    print(f"{'round':>5} {'load':>5} {'goodput':>8}  ends; begun by an engine")
    for o in outcomes:
        ends = ", ".join(f"{count} {end}" for end, count in sorted(o.ends.items()))
        print(f"{o.number:5} {o.load:5g} {o.goodput:8.1f}  {ends}; {o.started}")
    print(f"{'load':>11} {'of peak':>8}  median of {plan.rounds}")
    for load, ratio in of_peak.items():
        print(f"{load:11g} {ratio:8.1%}")
    if args.json is not None:
        record = {
            "date": date.today().isoformat(),
            "machine": f"{platform.machine()}, Python {platform.python_version()}",
            "command": "python -m benchmarks.bench_overload " + " ".join(sys.argv[1:]),
            "load_average": {"before": load_before, "after": os.getloadavg()},
            "plan": asdict(plan),
            "capacity": plan.capacity,
            "of_peak": of_peak,
            "results": [asdict(outcome) for outcome in outcomes],
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
