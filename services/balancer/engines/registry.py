"""The balancer's view of the engines: which are registered, which report, which are given up.

An engine leaves the view only when its registry key is gone and its load reports are broken too. A
paused etcd deletes all leases when it resumes, and that must not empty the fleet.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from google.protobuf import json_format

from inferfleet_proto.internal.v1 import engine_pb2
from services.balancer.config import BalancerConfig
from services.balancer.engines.breaker import Breaker
from services.balancer.engines.engine_view import EngineState, EngineView
from services.balancer.engines.load_watch import watch_load
from services.balancer.engines.member import Member
from services.balancer.engines.recall import recall_waiting
from services.common.etcd.registry import RegistryRecords
from services.common.rpc import Membership
from services.common.rpc.carrier import CarrierConnection
from services.common.service.background import Background
from services.common.tasks import cancel_and_wait

log = logging.getLogger(__name__)

_SWEEP_S = 0.1
_CLOSE_CHECKS = 20
_LOG_EVERY_S = 60.0
_MAX_KNOWN_MODELS = 10_000


class EngineRegistry:
    """Owns the members. Other parts get frozen views.

    Args:
        records: the registry records of the engines (EngineInfo as JSON), started and stopped by
            their owner.
        background: runs the registry's tasks; closed by its owner before `stop`.
        changed: called, on the event loop, after every possible change of an engine's free slots or
            state.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: BalancerConfig,
        membership: Membership,
        records: RegistryRecords,
        background: Background,
        *,
        changed: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._membership = membership
        self._records = records
        self._background = background
        self._changed = changed
        self._clock = clock
        self._members: dict[str, Member] = {}
        self._watches: dict[Member, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._known_models: set[str] = set()
        self._bad_logged: dict[str, float] = {}

    def start(self) -> None:
        """Begin to follow the registry and the engines."""
        self._apply_records()
        self._background.spawn(self._follow_records(), "engine records")
        self._background.spawn(self._sweep_periodically(), "engine sweep")

    async def stop(self) -> None:
        """Cancel all streams to engines and close their channels; idempotent.

        The background tasks must have ended before, or they would add the engines again.
        """
        for member in list(self._members.values()):
            self._remove(member, "the balancer is stopping")
        if self._closing:
            await asyncio.wait(set(self._closing))

    def members(self, model: str | None = None) -> list[Member]:
        """All engines, or those of one model, sorted by id."""
        found = (m for m in self._members.values() if model is None or m.info.model == model)
        return sorted(found, key=lambda m: m.info.engine_id)

    def member(self, engine_id: str) -> Member | None:
        """The engine with this id, or None."""
        return self._members.get(engine_id)

    def views(self, model: str) -> list[EngineView]:
        """Frozen views of the engines of a model, as of now."""
        now = self._clock()
        return [m.view(now) for m in self._members.values() if m.info.model == model]

    def has_served(self, model: str) -> bool:
        """Whether an engine serves this model now, or did since this balancer started."""
        return model in self._known_models

    @property
    def empty(self) -> bool:
        """Whether the view has no engine at all, as before etcd is first reached."""
        return not self._members

    def any_serving(self) -> bool:
        """Whether at least one engine takes new work."""
        now = self._clock()
        return any(m.state(now) is EngineState.SERVING for m in self._members.values())

    async def _follow_records(self) -> None:
        version = -1
        while True:
            version = await self._records.wait_change(version)
            self._apply_records()

    async def _sweep_periodically(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self._sweep()
            self._changed()

    def _apply_records(self) -> None:
        """Make the members agree with the current registry records."""
        seen: set[str] = set()
        for key, value in self._records.snapshot().items():
            info = self._parse_record(key, value)
            if info is not None:
                seen.add(info.engine_id)
                self._add_or_update(info)
        for engine_id, member in self._members.items():
            member.set_registered(engine_id in seen)
        self._sweep()
        self._changed()

    def _parse_record(self, key: str, value: bytes) -> engine_pb2.EngineInfo | None:
        try:
            info = json_format.Parse(value, engine_pb2.EngineInfo(), ignore_unknown_fields=True)
        except (json_format.ParseError, UnicodeDecodeError) as error:
            self._log_bad_record(key, f"not an EngineInfo: {error}")
            return None
        missing = [
            name
            for name in ("engine_id", "address", "model", "block_size", "max_num_seqs")
            if not getattr(info, name)
        ]
        if missing:
            self._log_bad_record(key, f"{', '.join(missing)}: empty")
            return None
        if key.rsplit("/", 1)[-1] != info.engine_id:
            self._log_bad_record(key, f"holds the record of engine {info.engine_id}")
            return None
        self._bad_logged.pop(key, None)
        return info

    def _log_bad_record(self, key: str, problem: str) -> None:
        now = self._clock()
        if now - self._bad_logged.get(key, -_LOG_EVERY_S) >= _LOG_EVERY_S:
            self._bad_logged[key] = now
            log.warning("registry key %s is ignored: %s", key, problem[:300])

    def _add_or_update(self, info: engine_pb2.EngineInfo) -> None:
        old = self._members.get(info.engine_id)
        if old is not None and info.epoch_ms < old.info.epoch_ms:
            return  # the record is older than the process in the view
        if old is not None and _same_life(old.info, info):
            old.update_record(info)
            return
        if old is not None:
            self._remove(old, "a new process has its id")
        self._add(info)

    def _add(self, info: engine_pb2.EngineInfo) -> None:
        config = self._config
        channel = self._membership.channel(info.address)
        link = CarrierConnection(self._membership, info.address, channel, registered=True)
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
            watch_load(member, link.peer, self._changed),
            name=f"load of {info.engine_id}",
        )

    def _sweep(self) -> None:
        """Remove engines that are gone, give up stalled ones, recall requests from full ones.

        A stopped engine may wake: it stays for a while though its registration has ended.
        """
        now = self._clock()
        for member in list(self._members.values()):
            away = not member.registered and not member.connected and self._records.connected
            if away and not member.may_wake(now):
                self._remove(member, "its registry key is gone and its load reports are broken")
                continue
            if member.stalled(now):
                self._give_up_stalled(member, now)
            else:
                member.clear_stuck()
        recalled = recall_waiting(self._members.values(), now)
        if recalled:
            log.info("%d requests recalled from full engines: others have free slots", recalled)

    def _give_up_stalled(self, member: Member, now: float) -> None:
        newly = member.mark_stuck()
        if self._another_serves(member, now):
            # At every sweep, because a request can be on its way there while the stall is found.
            moved = member.give_up("the engine makes no progress")
            if newly or moved:
                log.warning(
                    "engine %s stalled: %d streams moved away", member.info.engine_id, moved
                )
        elif newly:
            log.warning(
                "engine %s stalled: no other engine serves model %s, so its streams stay",
                member.info.engine_id,
                member.info.model,
            )

    def _another_serves(self, member: Member, now: float) -> bool:
        """Whether another engine serves the model; without one, its streams wait for this one."""
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
    """Close the channel once the streams that were given up no longer use it."""
    await cancel_and_wait(watch)
    for _ in range(_CLOSE_CHECKS):
        if not member.in_flight:
            break
        await asyncio.sleep(_SWEEP_S)
    if member.link is not None:
        await member.link.close()
    await member.channel.close(None)
