"""Faults of engines: killed, stopped, cut off, drained."""

import asyncio
import os
import signal
import time
from collections import Counter

from tests.chaos.scenario import IN_FLIGHT_S, STALL_HEAL_LIMIT_S, Row, Stage


async def engine_kill(stage: Stage) -> list[Row]:
    """SIGKILL of the engine with the most streams, again and again, all streams open."""
    row = Row("engine SIGKILL", needs_continuations=True)
    async with stage.under_load(row, watch=lambda name: not name.startswith("engine")):
        for _ in range(stage.plan.rounds):
            victim = await _busiest(stage)
            since = time.monotonic()
            stage.fleet.signal(victim, signal.SIGKILL)
            row.rounds += 1
            await stage.heal(row, since)
            stage.say(f"  {row.rounds}: {victim} killed, all flow after {row.heal_s[-1]:.2f} s")
            await stage.whole_again(row, since)
    return [row]


async def engine_stop(stage: Stage) -> list[Row]:
    """SIGSTOP of an engine's processes past the stall limit; it wakes and must not answer twice."""
    row = Row("engine SIGSTOP", needs_continuations=True, heal_limit_s=STALL_HEAL_LIMIT_S)
    async with stage.under_load(row, watch=lambda name: not name.startswith("engine")):
        for _ in range(min(stage.plan.rounds, 3)):
            victim = await _busiest(stage)
            since = time.monotonic()
            stage.fleet.signal(victim, signal.SIGSTOP, group=True)
            row.rounds += 1
            await stage.heal(row, since, in_flight_s=IN_FLIGHT_S)
            stage.fleet.signal(victim, signal.SIGCONT, group=True)
            stage.say(f"  {row.rounds}: {victim} stopped, all flow after {row.heal_s[-1]:.2f} s")
            await stage.whole_again(row)
            # What it woke up with must be gone, or it would still answer.
            await stage.flowing(stage.plan.streams // 2)
    await _idle(stage, row)
    return [row]


async def core_stop(stage: Stage) -> list[Row]:
    """SIGSTOP of an idle engine's core alone: its front takes requests and reports an idle core."""
    row = Row("engine's core SIGSTOP, idle at first", heal_limit_s=STALL_HEAL_LIMIT_S)
    await _idle(stage, row)
    victim = stage.fleet.engines[0]
    core = stage.fleet.core_pid(victim)
    os.kill(core, signal.SIGSTOP)
    row.rounds += 1
    since = time.monotonic()
    try:
        async with stage.under_load(row, watch=lambda name: not name.startswith("engine")):
            await stage.heal(row, since)
            # Here the streams that count are those that had not begun.
            row.heal_s[-1] = max(row.heal_s[-1], row.first_s[-1])
            views = [await stage.fleet.seen_by(name) for name in stage.fleet.balancers]
            seen = [e.state for view in views for e in view if e.info.engine_id == victim]
            row.notes["seen_as"] = seen
            if "stalled" not in seen:
                row.violations.append(f"{victim} was not found: seen as {seen}")
            stage.say(f"  core of {victim} stopped, all flow after {row.heal_s[-1]:.2f} s")
            os.kill(core, signal.SIGCONT)
            await stage.whole_again(row)
            await stage.flowing(stage.plan.streams // 2)
    finally:
        os.kill(core, signal.SIGCONT)
    await _idle(stage, row)
    return [row]


async def engine_cut(stage: Stage) -> list[Row]:
    """The network before one engine: connections reset, then a cable that is silent both ways."""
    rows = []
    name, proxy = next(iter(stage.fleet.proxies.items()))
    for what, cut in (("reset", proxy.reset), ("silent", proxy.silence)):
        row = Row(f"engine cut off ({what})", needs_continuations=True)
        if what == "silent":
            row.heal_limit_s = STALL_HEAL_LIMIT_S
        async with stage.under_load(row, watch=lambda name: True):
            await _until_busy(stage, name)
            since = time.monotonic()
            cut()
            row.rounds += 1
            in_flight_s = IN_FLIGHT_S if what == "silent" else 0.0
            await stage.heal(row, since, in_flight_s=in_flight_s)
            await asyncio.sleep(1.0)
            proxy.heal()
            await stage.whole_again(row)
        await _idle(stage, row)
        rows.append(row)
    return rows


async def engine_drain(stage: Stage) -> list[Row]:
    """SIGTERM of every engine in turn: its streams end or go on elsewhere."""
    row = Row("engine drain")
    async with stage.under_load(row, watch=lambda name: not name.startswith("engine")):
        for name in stage.fleet.engines:
            since = time.monotonic()
            row.rounds += 1
            await stage.fleet.restart(name)
            await stage.whole_again(row, since)
            await stage.heal(row, time.monotonic())
    return [row]


async def _busiest(stage: Stage) -> str:
    await stage.flowing(stage.plan.streams // 2)
    held: Counter[str] = Counter()
    for name in stage.fleet.engines:
        load = await stage.fleet.load(name)
        held[name] = load.running_requests if load is not None else 0
    return held.most_common(1)[0][0]


async def _until_busy(stage: Stage, name: str) -> None:
    async def busy() -> bool:
        load = await stage.fleet.load(name)
        return load is not None and load.running_requests > 2

    await stage.fleet.until(busy, f"work at {name}", 60.0)


async def _idle(stage: Stage, row: Row) -> None:
    """No engine may keep a request that has no client any more."""

    async def idle() -> bool:
        return await stage.fleet.running() == 0

    try:
        row.notes["idle_s"] = round(await stage.fleet.until(idle, "idle engines", 30.0), 2)
    except TimeoutError:
        row.violations.append("an engine still runs requests that have no client")
