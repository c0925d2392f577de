"""The keys of expert placement in etcd and every transaction on them.

Below /inferfleet/placement/<group>/ there are `map`, `history/<version>`, `leader` and, under the
leases of the engines, `applied/<engine_id>` and `loads/<engine_id>`. `map` is written by
compare-and-swap only, in one transaction with its history entry.
"""

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from msgspec.structs import replace

from services.common.etcd.client import Compare, Delete, Etcd, KeyValue, Put
from services.engine.eplb.placement_map import (
    MAX_BYTES,
    Applied,
    EngineLoads,
    MapFormatError,
    PlacementMap,
    decode,
    encode,
    version_in,
)

ROOT = "/inferfleet/placement/"
HISTORY = 20
"""Number of maps that are kept for a rollback, including the current one."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
K = TypeVar("K")
R = TypeVar("R")


class MapTooLargeError(ValueError):
    """The map is too large for a request to etcd."""


def group_of(model: str, model_revision: str) -> str:
    """Name of the engines that share a map: served name and start of the weights' digest."""
    digest = model_revision.rpartition(":")[2]
    return f"{_UNSAFE.sub('-', model)}-{_UNSAFE.sub('-', digest)[:12]}"


@dataclass(frozen=True)
class GroupKeys:
    """The keys of one group."""

    group: str

    @property
    def prefix(self) -> str:
        return f"{ROOT}{self.group}/"

    @property
    def map(self) -> str:
        return f"{self.prefix}map"

    @property
    def leader(self) -> str:
        return f"{self.prefix}leader"

    @property
    def history_prefix(self) -> str:
        return f"{self.prefix}history/"

    def history(self, version: int) -> str:
        return f"{self.history_prefix}{version}"

    def applied(self, engine_id: str) -> str:
        return f"{self.prefix}applied/{engine_id}"

    def loads(self, engine_id: str) -> str:
        return f"{self.prefix}loads/{engine_id}"


@dataclass(frozen=True)
class GroupState:
    """All records of a group at one revision of etcd."""

    current: PlacementMap | None = None
    mod_revision: int = 0
    """Modification revision of the map's key; 0 if there is no map."""
    problem: str = ""
    """Why the map's value cannot be read; empty if it can."""
    last_version: int = 0
    """The highest version of the map and the history."""
    history: Mapping[int, PlacementMap] = field(default_factory=dict)
    history_versions: tuple[int, ...] = ()
    """All versions of the history, ascending, including maps that cannot be read."""
    applied: Mapping[str, Applied] = field(default_factory=dict)
    loads: Mapping[str, EngineLoads] = field(default_factory=dict)
    leader: str = ""

    @property
    def newest(self) -> PlacementMap | None:
        """The current map or, if it cannot be read, the newest readable one of the history."""
        return self.current or self.history.get(max(self.history, default=0))


class PlacementStore:
    """Reads and writes one group's records; used by controller, watcher and command line."""

    def __init__(self, etcd: Etcd, group: str) -> None:
        self.etcd = etcd
        self.keys = GroupKeys(group)

    async def read(self) -> GroupState:
        """Read the group at one revision."""
        listing = await self.etcd.get_prefix(self.keys.prefix)
        return group_state(self.keys, listing.items)

    async def write(
        self, draft: PlacementMap, over: GroupState, *, fence: Compare | None = None
    ) -> PlacementMap | None:
        """Write the next version, if the map has not changed since `over` was read.

        Args:
            fence: the leader's comparison, so that a deposed leader cannot write.

        Returns:
            The map that was written; None if the map has changed or the leader is deposed.

        Raises:
            MapTooLargeError: nothing was sent.
            EtcdUnavailableError: the map may have been written; read before trying again.
        """
        placement = replace(draft, version=over.last_version + 1)
        surplus = max(0, len(over.history_versions) + 1 - HISTORY)
        expired = [Delete(self.keys.history(v)) for v in over.history_versions[:surplus]]
        compares = [Compare(self.keys.map, "mod", over.mod_revision)]
        if fence is not None:
            compares.append(fence)
        puts = _puts(self.keys, placement, [placement])
        done = await self.etcd.transaction(compares, [*puts, *expired])
        return None if done is None else placement

    async def restore(
        self, placement: PlacementMap, earlier: Iterable[PlacementMap], mod_revision: int
    ) -> bool:
        """Write a map under its own version, where an emptied or older store has lost it.

        Returns whether it was written: not if the map's key is no longer at `mod_revision`.
        """
        puts = _puts(self.keys, placement, [*earlier, placement])
        compare = Compare(self.keys.map, "mod", mod_revision)
        return await self.etcd.transaction([compare], puts) is not None


async def list_groups(etcd: Etcd) -> dict[str, GroupState]:
    """Read all groups at one revision, by name."""
    listing = await etcd.get_prefix(ROOT)
    names = {key.removeprefix(ROOT).partition("/")[0] for key in listing.items}
    return {name: group_state(GroupKeys(name), listing.items) for name in sorted(names)}


def group_state(keys: GroupKeys, items: Mapping[str, KeyValue]) -> GroupState:
    """Decode the keys of a group; engines' records that cannot be read are left out."""
    current, problem, found = None, "", items.get(keys.map)
    if found is not None:
        try:
            current = decode(found.value, PlacementMap)
        except MapFormatError as error:
            problem = str(error)
    raw_history = {
        int(name): raw for name, raw in _below(items, keys.history_prefix).items() if name.isdigit()
    }
    history = _readable(raw_history, PlacementMap)
    versions = tuple(sorted(raw_history))
    last = max((0 if found is None else version_in(found.value), *versions))
    leader = items.get(keys.leader)
    return GroupState(
        current=current,
        mod_revision=0 if found is None else found.mod_revision,
        problem=problem,
        last_version=last,
        history=history,
        history_versions=versions,
        applied=_readable(_below(items, keys.applied("")), Applied),
        loads=_readable(_below(items, keys.loads("")), EngineLoads),
        leader="" if leader is None else leader.value.decode(errors="replace"),
    )


def now_ms() -> int:
    """The current time for `created_unix_ms`."""
    return int(time.time() * 1000)


def _puts(keys: GroupKeys, current: PlacementMap, kept: Iterable[PlacementMap]) -> list[Put]:
    value = encode(current)
    if len(value) > MAX_BYTES:
        raise MapTooLargeError(
            f"the map has {len(value)} bytes of JSON; at most {MAX_BYTES} fit twice into one "
            "request to etcd"
        )
    history = {placement.version: encode(placement) for placement in kept}
    return [
        Put(keys.map, value),
        *(Put(keys.history(version), raw) for version, raw in history.items()),
    ]


def _below(items: Mapping[str, KeyValue], prefix: str) -> dict[str, bytes]:
    return {k.removeprefix(prefix): kv.value for k, kv in items.items() if k.startswith(prefix)}


def _readable(raw: Mapping[K, bytes], kind: type[R]) -> dict[K, R]:
    records: dict[K, R] = {}
    for name, value in raw.items():
        try:
            records[name] = decode(value, kind)
        except MapFormatError:
            continue
    return records
