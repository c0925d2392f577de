"""The balancer's picture of the fleet: who is registered, who reports, who is given up.

An engine leaves only when its key is gone and its load reports are broken as well: a paused etcd
deletes all leases when it goes on, and that must not empty the fleet.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from google.protobuf import json_format

from inferfleet_proto.internal.v1 import engine_pb2
from services.balancer.config import BalancerConfig
from services.balancer.engines.breaker import Breaker
from services.balancer.engines.engine_view import EngineState, EngineView
from services.balancer.engines.load_watch import watch_load
from services.balancer.engines.member import Member
from services.balancer.engines.recall import recall
from services.common.rpc import Membership
from services.common.rpc.carrier import Link

log = logging.getLogger(__name__)

_TICK_S = 0.1
_CLOSE_TICKS = 20
_LOG_EVERY_S = 60.0
_MAX_KNOWN_MODELS = 10_000


class EngineKeys(Protocol):
    """The part of services.common.etcd.registry.RegistryView that is needed here."""

    def snapshot(self) -> Mapping[str, bytes]:
        """Key → EngineInfo as JSON, as last known."""

    async def wait_change(self, version: int) -> int:
        """Return the version once it differs from `version`."""

    @property
    def connected(self) -> bool:
        """Whether the snapshot is being kept up to date."""


class EngineRegistry:
    """Owns the members; others get frozen views.

    Args:
        keys: the registry's view, started and stopped by its owner.
        changed: called, on the loop, whenever room or state of an engine may have changed.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: BalancerConfig,
        membership: Membership,
        keys: EngineKeys,
        *,
        changed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._membership = membership
        self._keys = keys
        self._changed = changed
        self._clock = clock
        self._members: dict[str, Member] = {}
        self._watches: dict[Member, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._known_models: set[str] = set()
        self._bad_logged: dict[str, float] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin to follow registry and engines; returns at once."""
        self._apply()
        self._tasks = [
            asyncio.create_task(self._follow(), name="registry"),
            asyncio.create_task(self._tick(), name="registry tick"),
        ]

    async def stop(self) -> None:
        """End all streams to engines; idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        for member in list(self._members.values()):
            self._remove(member, "the balancer stops")
        waiting = {*tasks, *self._closing}
        if waiting:
            await asyncio.wait(waiting)

    def members(self, model: str | None = None) -> list[Member]:
        """All engines, or those of one model, by id."""
        found = (m for m in self._members.values() if model is None or m.info.model == model)
        return sorted(found, key=lambda m: m.info.engine_id)

    def member(self, engine_id: str) -> Member | None:
        """The engine of this id."""
        return self._members.get(engine_id)

    def views(self, model: str) -> list[EngineView]:
        """Frozen views of a model's engines at this moment."""
        now = self._clock()
        return [m.view(now) for m in self._members.values() if m.info.model == model]

    def knows(self, model: str) -> bool:
        """Whether an engine serves this model, or did since this balancer started."""
        return model in self._known_models

    @property
    def empty(self) -> bool:
        """Whether no engine is known at all (as before etcd is first reached)."""
        return not self._members

    def any_serving(self) -> bool:
        """Whether at least one engine takes new work."""
        now = self._clock()
        return any(m.state(now) is EngineState.SERVING for m in self._members.values())

    async def _follow(self) -> None:
        version = -1
        while True:
            version = await self._keys.wait_change(version)
            self._apply()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._sweep()
            self._changed()

    def _apply(self) -> None:
        """Make the members agree with the registry's snapshot."""
        seen: set[str] = set()
        for key, value in self._keys.snapshot().items():
            info = self._parsed(key, value)
            if info is not None:
                seen.add(info.engine_id)
                self._upsert(info)
        for engine_id, member in self._members.items():
            member.registered = engine_id in seen
        self._sweep()
        self._changed()

    def _parsed(self, key: str, value: bytes) -> engine_pb2.EngineInfo | None:
        try:
            info = json_format.Parse(value, engine_pb2.EngineInfo(), ignore_unknown_fields=True)
        except (json_format.ParseError, UnicodeDecodeError) as error:
            self._refuse(key, f"not an EngineInfo: {error}")
            return None
        missing = [
            name
            for name in ("engine_id", "address", "model", "block_size", "max_num_seqs")
            if not getattr(info, name)
        ]
        if missing:
            self._refuse(key, f"{', '.join(missing)}: empty")
            return None
        if key.rsplit("/", 1)[-1] != info.engine_id:
            self._refuse(key, f"holds the record of engine {info.engine_id}")
            return None
        self._bad_logged.pop(key, None)
        return info

    def _refuse(self, key: str, problem: str) -> None:
        now = self._clock()
        if now - self._bad_logged.get(key, -_LOG_EVERY_S) >= _LOG_EVERY_S:
            self._bad_logged[key] = now
            log.warning("registry key %s is ignored: %s", key, problem[:300])

    def _upsert(self, info: engine_pb2.EngineInfo) -> None:
        old = self._members.get(info.engine_id)
        if old is not None and info.epoch_ms < old.info.epoch_ms:
            return  # a record written before the process that we already know
        if old is not None and _same_life(old.info, info):
            old.info = info
            return
        if old is not None:
            self._remove(old, "a new process has its id")
        config = self._config
        channel = self._membership.channel(info.address)
        link = Link(self._membership, info.address, channel)
        member = Member(
            info,
            channel,
            Breaker(config.breaker_failures, config.breaker_open_s),
            stall_limit_s=config.stall_limit_s,
            clock=self._clock,
            link=link,
        )
        link.prepare()
        self._members[info.engine_id] = member
        if len(self._known_models) < _MAX_KNOWN_MODELS:
            self._known_models.add(info.model)
        log.info("engine %s joined: %s at %s", info.engine_id, info.model, info.address)
        self._watches[member] = asyncio.create_task(
            watch_load(member, self._membership.metadata, self._changed),
            name=f"load of {info.engine_id}",
        )

    def _sweep(self) -> None:
        """Let go of ghosts, give up engines that have stalled, take back what waits for nothing."""
        now = self._clock()
        for member in list(self._members.values()):
            if not member.registered and not member.connected and self._keys.connected:
                self._remove(member, "its key is gone and its reports are broken")
                continue
            if member.stalled(now):
                self._leave_stalled(member, now)
            else:
                member.stuck = False
        moved = recall(self._members.values(), now)
        if moved:
            log.info("%d requests taken back from full engines: others have room", moved)

    def _leave_stalled(self, member: Member, now: float) -> None:
        first, member.stuck = not member.stuck, True
        if self._another_serves(member, now):
            # At every sweep: what was being sent there when it was found out must leave too.
            moved = member.give_up("the engine makes no progress")
            if first or moved:
                log.warning(
                    "engine %s stalled: %d streams moved away", member.info.engine_id, moved
                )
        elif first:
            log.warning("engine %s stalled: its streams have nowhere to go", member.info.engine_id)

    def _another_serves(self, member: Member, now: float) -> bool:
        """Whether giving up could help: a stream that nobody else can take waits for its engine."""
        others = (other for other in self._members.values() if other is not member)
        return any(
            other.info.model == member.info.model and other.state(now) is EngineState.SERVING
            for other in others
        )

    def _remove(self, member: Member, reason: str) -> None:
        log.info("engine %s left: %s", member.info.engine_id, reason)
        del self._members[member.info.engine_id]
        watch = self._watches.pop(member)
        watch.cancel()
        member.give_up(reason)
        closing = asyncio.create_task(_close(member, watch), name="close channel")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


def _same_life(old: engine_pb2.EngineInfo, new: engine_pb2.EngineInfo) -> bool:
    return (old.epoch_ms, old.address, old.model) == (new.epoch_ms, new.address, new.model)


async def _close(member: Member, watch: "asyncio.Task[None]") -> None:
    """Close the channel once the streams that were given up have let go of it."""
    await asyncio.wait({watch})
    for _ in range(_CLOSE_TICKS):
        if not member.in_flight:
            break
        await asyncio.sleep(_TICK_S)
    if member.link is not None:
        await member.link.close()
    await member.channel.close(None)
