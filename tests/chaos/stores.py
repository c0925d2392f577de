"""Faults of Redis and etcd: down, emptied, slow, stopped, refusing."""

import asyncio
import contextlib
import time
from collections.abc import Callable

import redis

from inferfleet_cli.supervisor.dev_backends import ServerProcess
from tests.chaos.scenario import HEAL_LIMIT_S, Row, Stage

_INDEX_LIMIT_S = 10.0


async def redis_down(stage: Stage) -> list[Row]:
    """Redis is killed and starts again, empty, a minute later."""
    return [await _outage(stage, "Redis down, restarted empty", stage.fleet.redis)]


async def redis_absent(stage: Stage) -> list[Row]:
    """The KV-cache service is started while there is no Redis, which comes later."""
    row = Row("kvcache started without Redis", rounds=1)
    store = stage.fleet.redis
    async with stage.under_load(row, watch=lambda name: name != "kvcache"):
        await stage.fleet.blocking(store.kill)
        try:
            since = time.monotonic()
            # Beside the restart: how long a process takes to start is not what streams wait for.
            await asyncio.gather(stage.heal(row, since), stage.fleet.restart("kvcache"))
            await stage.whole_again(row, since)
        finally:
            await stage.fleet.blocking(store.launch)
        await _end(stage, row, time.monotonic())
    return [row]


async def redis_stop(stage: Stage) -> list[Row]:
    """SIGSTOP of Redis: connections stay, nothing answers."""
    store = stage.fleet.redis
    return [await _during(stage, "Redis SIGSTOP", store.pause, store.resume, stage.plan.pause_s)]


async def redis_slow(stage: Stage) -> list[Row]:
    """CLIENT PAUSE in a row: every command waits for 0.2 s."""
    stop_at = time.monotonic() + stage.plan.pause_s

    async def slow() -> None:
        while time.monotonic() < stop_at:
            await stage.fleet.blocking(lambda: _command(stage, "CLIENT", "PAUSE", "200"))
            await asyncio.sleep(0.05)

    row = Row("Redis slow (CLIENT PAUSE)")
    async with _load(stage, row):
        slowing = asyncio.create_task(slow())
        await stage.heal(row, time.monotonic())
        await slowing
        await _end(stage, row, time.monotonic())
    return [row]


async def redis_password(stage: Stage) -> list[Row]:
    """Redis suddenly requires a password that no service has, and later does not."""

    def refuse() -> None:
        _command(stage, "CONFIG", "SET", "requirepass", "other")
        _command(stage, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "no", password="other")

    def accept() -> None:
        _command(stage, "CONFIG", "SET", "requirepass", "", password="other")

    return [await _during(stage, "Redis wrong password", refuse, accept, stage.plan.pause_s)]


async def etcd_down(stage: Stage) -> list[Row]:
    """etcd is killed and starts a minute later, first with its data, then without."""
    assert stage.fleet.etcd is not None
    return [
        await _outage(stage, "etcd down, data kept", stage.fleet.etcd, erase=False),
        await _outage(stage, "etcd down, data lost", stage.fleet.etcd),
    ]


async def etcd_stop(stage: Stage) -> list[Row]:
    """SIGSTOP of etcd for longer than the services' lease of 5 s."""
    store = stage.fleet.etcd
    assert store is not None
    return [await _during(stage, "etcd SIGSTOP", store.pause, store.resume, stage.plan.pause_s)]


async def etcd_leader(stage: Stage) -> list[Row]:
    """The leader of three members with TLS is killed, twice, then stopped."""
    cluster = stage.cluster
    assert cluster is not None
    row = Row("etcd leader lost, 3 members, TLS")
    async with _load(stage, row):
        for how in ("kill", "kill", "pause"):
            leader = await asyncio.to_thread(cluster.leader)
            assert leader is not None, "the cluster has no leader"
            since = time.monotonic()
            getattr(leader, how)()
            await stage.heal(row, since)
            await _until_registered(stage, row, since)
            await asyncio.sleep(max(0.0, since + stage.plan.pause_s - time.monotonic()))
            if how == "pause":
                leader.resume()
            else:
                await asyncio.to_thread(cluster.restart, leader)
            await _end(stage, row, time.monotonic())
        row.rounds = 3
    return [row]


async def _outage(stage: Stage, name: str, store: ServerProcess, erase: bool = True) -> Row:
    def end() -> None:
        if erase:
            store.erase()
        store.launch()

    return await _during(stage, name, store.kill, end, stage.plan.outage_s)


async def _during(
    stage: Stage, name: str, begin: Callable[[], None], end: Callable[[], None], seconds: float
) -> Row:
    """All streams run before, during and after the fault; new ones begin all the time."""
    row = Row(name)
    async with _load(stage, row):
        since = time.monotonic()
        await stage.fleet.blocking(begin)
        try:
            await stage.heal(row, since)
            await asyncio.sleep(max(0.0, since + seconds - time.monotonic()))
        finally:
            await stage.fleet.blocking(end)
        await _end(stage, row, time.monotonic())
    row.notes["seconds"] = seconds
    return row


def _load(stage: Stage, row: Row) -> contextlib.AbstractAsyncContextManager[None]:
    row.rounds, row.heal_limit_s = 1, HEAL_LIMIT_S
    return stage.under_load(row, watch=lambda _: True)


async def _end(stage: Stage, row: Row, since: float) -> None:
    await stage.heal(row, since)
    await stage.whole_again(row, since)
    await _until_registered(stage, row, since)
    await _until_indexed(stage, row, since)


async def _until_registered(stage: Stage, row: Row, since: float) -> None:
    """Every key is back in etcd."""
    await stage.fleet.until(lambda: _registered(stage), "all keys in etcd", 60.0)
    row.notes["registered_s"] = round(time.monotonic() - since, 2)


async def _registered(stage: Stage) -> bool:
    fleet = stage.fleet
    views = await asyncio.gather(*(fleet.seen_by(name) for name in fleet.balancers))
    return all(
        {one.info.engine_id for one in v if one.registered} == set(fleet.engines) for v in views
    )


async def _until_indexed(stage: Stage, row: Row, since: float) -> None:
    """The index knows blocks of every engine again."""
    await stage.fleet.until(lambda: _indexed(stage), "the index to know all engines", 60.0)
    row.notes["indexed_s"] = round(time.monotonic() - since, 2)
    if row.notes["indexed_s"] > _INDEX_LIMIT_S:
        row.notes["slow_index"] = True


async def _indexed(stage: Stage) -> bool:
    stats = await stage.fleet.index_stats()
    return stats is not None and stats.entries > 0 and len(stats.owners) >= len(stage.fleet.engines)


def _command(stage: Stage, *words: str, password: str | None = None) -> None:
    client = redis.Redis.from_url(stage.fleet.redis.url, password=password, socket_timeout=5)
    with client, contextlib.suppress(redis.ConnectionError):
        client.execute_command(*words)
