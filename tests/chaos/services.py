"""Faults of gateways, balancers and the KV-cache service, and restarts of every service in turn."""

import signal
import time
from functools import partial

from tests.chaos.scenario import HEAL_LIMIT_S, IN_FLIGHT_S, Row, Stage

DROP_LIMIT_S = 1.0
# A channel pings after 11 s and waits 8 s for the answer.
_UNHEARD_S = 19.0


async def balancer_kill(stage: Stage) -> list[Row]:
    """SIGKILL of the balancers in turn: the gateways resume through the other."""
    row = Row("balancer SIGKILL", needs_continuations=True)
    names = [name for name in stage.fleet.children if name.startswith("balancer")]
    async with stage.under_load(row, watch=lambda name: not name.startswith("balancer")):
        for number in range(min(stage.plan.rounds, 6)):
            await stage.flowing(stage.plan.streams // 2)
            since = time.monotonic()
            stage.fleet.signal(names[number % len(names)], signal.SIGKILL)
            row.rounds += 1
            await stage.heal(row, since)
            await stage.whole_again(row, since)
    return [row]


async def balancer_stop(stage: Stage) -> list[Row]:
    """SIGSTOP of a balancer: connections stay open, nothing moves, until pings time out."""
    row = Row("balancer SIGSTOP", needs_continuations=True, heal_limit_s=_UNHEARD_S + HEAL_LIMIT_S)
    async with stage.under_load(row, watch=lambda name: not name.startswith("balancer")):
        since = time.monotonic()
        stage.fleet.signal("balancer-1", signal.SIGSTOP)
        try:
            await stage.heal(row, since, in_flight_s=IN_FLIGHT_S)
        finally:
            stage.fleet.signal("balancer-1", signal.SIGCONT)
        row.rounds += 1
        await stage.whole_again(row)
    return [row]


async def gateway_kill(stage: Stage) -> list[Row]:
    """SIGKILL of a gateway: engines drop its work; its clients repeat elsewhere, same answers."""
    row = Row("gateway SIGKILL")
    for round_number in range(min(stage.plan.rounds, 4)):
        name = f"gateway-{round_number % 2 + 1}"
        address = stage.fleet.addresses[name]
        alone = Row(row.scenario)
        async with stage.under_load(alone, gateway=round_number % 2):
            # All streams use this gateway and no client repeats yet, so engines must drop them all.
            stage.clients.hold_repeats()
            stage.clients.may_break = partial(_is, address)
            await stage.flowing(stage.plan.streams // 2)
            stage.fleet.signal(name, signal.SIGKILL)
            row.rounds += 1
            dropped = await stage.fleet.until(lambda: _idle(stage), "engines to drop its work", 30)
            row.notes.setdefault("dropped_s", []).append(round(dropped, 2))
            since = time.monotonic()
            stage.clients.release_repeats()
            await stage.heal(row, since)
            await stage.whole_again(row, since)
        stage.clients.may_break = lambda _, __: False
        _add(row, alone)
        if dropped > DROP_LIMIT_S:
            row.notes["slow_drop"] = True
    if not row.counts.repeated:
        row.violations.append("no stream was hit")
    return [row]


async def kvcache_kill(stage: Stage) -> list[Row]:
    """SIGKILL of the KV-cache service: routing continues by load."""
    row = Row("kvcache SIGKILL")
    async with stage.under_load(row, watch=lambda name: name != "kvcache"):
        for _ in range(min(stage.plan.rounds, 3)):
            since = time.monotonic()
            stage.fleet.signal("kvcache", signal.SIGKILL)
            row.rounds += 1
            await stage.heal(row, since)
            await stage.whole_again(row, since)
    return [row]


async def rolling_restart(stage: Stage) -> list[Row]:
    """SIGTERM, drain and start of every service, one after the other."""
    row = Row("rolling restart of everything")
    stage.clients.may_break = lambda _, begun: not begun
    async with stage.under_load(row):
        for name in list(stage.fleet.children):
            since = time.monotonic()
            seconds = await stage.fleet.restart(name)
            stage.say(f"  {name} restarted in {seconds:.1f} s")
            row.rounds += 1
            await stage.whole_again(row, since)
            await stage.heal(row, time.monotonic())
    stage.clients.may_break = lambda _, __: False
    return [row]


def _is(wanted: str, address: str, begun: bool) -> bool:
    return address == wanted


async def _idle(stage: Stage) -> bool:
    return await stage.fleet.running() == 0


def _add(total: Row, part: Row) -> None:
    for name, value in vars(part.counts).items():
        setattr(total.counts, name, getattr(total.counts, name) + value)
