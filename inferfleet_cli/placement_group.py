"""Which group of engines a `placement` command means, what its maps must fit, and who has it."""

import argparse
import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from inferfleet_cli.errors import CliError
from inferfleet_cli.supervisor.state_dir import StateDir
from services.common.config.settings import ConfigError
from services.common.etcd.client import Etcd, EtcdError
from services.common.etcd.config import EtcdKeys, connect
from services.engine.contract.runner import ExpertShape
from services.engine.eplb.placement_map import Applied
from services.engine.eplb.placement_store import GroupState, PlacementStore, list_groups

NOTHING_THERE, CONFLICT, REFUSED = 3, 4, 5
_POLL_S = 0.1


@dataclass(frozen=True)
class Target:
    """A group, and what a map for it must fit."""

    store: PlacementStore
    state: GroupState
    model: str
    model_revision: str
    shape: ExpertShape

    @property
    def name(self) -> str:
        return self.store.keys.group


@asynccontextmanager
async def connected(args: argparse.Namespace) -> AsyncIterator[Etcd]:
    """The etcd that was named, or the local fleet's; its failures in words."""
    endpoints = args.etcd or _local(args.state_dir)
    keys = EtcdKeys(
        etcd=tuple(endpoint.strip() for endpoint in endpoints.split(",")),
        etcd_tls_ca_file=args.etcd_tls_ca_file,
        etcd_tls_cert_file=args.etcd_tls_cert_file,
        etcd_tls_key_file=args.etcd_tls_key_file,
        etcd_user=args.etcd_user,
        etcd_password_file=args.etcd_password_file,
    )
    try:
        etcd = connect(keys, timeout_s=5.0)
    except ConfigError as error:
        raise CliError(f"--{error}", 2) from error
    try:
        yield etcd
    except EtcdError as error:
        raise CliError(f"{error} (asked {endpoints}; --etcd names another)") from error
    finally:
        await etcd.close()


async def find_target(etcd: Etcd, name: str) -> Target:
    """The group of this name or of this model, or the only one there is.

    Raises:
        CliError: there is none, or there are several.
    """
    groups = await list_groups(etcd)
    chosen = _choose(groups, name)
    return _target(PlacementStore(etcd, chosen), groups[chosen])


async def wait_settled(store: PlacementStore, version: int, wait_s: float) -> Mapping[str, Applied]:
    """What the engines say of a version, as soon as each has it or refuses it, or time is up."""
    deadline = asyncio.get_running_loop().time() + wait_s
    while True:
        applied = (await store.read()).applied
        settled = all(one.settled(version) for one in applied.values())
        if settled or asyncio.get_running_loop().time() >= deadline:
            return applied
        await asyncio.sleep(_POLL_S)


def _local(state_dir: Path) -> str:
    record = StateDir(state_dir).read_record()
    if record is None:
        raise CliError(
            f"no fleet runs in {state_dir}: start one with `inferfleet up`, or name the etcd of"
            " another with --etcd"
        )
    return str(record["etcd"])


def _choose(groups: Mapping[str, GroupState], name: str) -> str:
    if not groups:
        raise CliError(
            "etcd knows of no model with experts: no engine that serves one is registered, and no"
            " map is kept",
            NOTHING_THERE,
        )
    matching = [group for group in groups if name in ("", group, _model(groups[group]))]
    if len(matching) == 1:
        return matching[0]
    listed = ", ".join(matching or groups)
    if matching:
        raise CliError(f"--group: there are several, name one of: {listed}")
    raise CliError(f"--group: there is no {name!r}, only: {listed}", NOTHING_THERE)


def _model(state: GroupState) -> str:
    for record in state.loads.values():
        return record.model
    return "" if state.newest is None else state.newest.model


def _target(store: PlacementStore, state: GroupState) -> Target:
    shapes = Counter(record.shape for record in state.loads.values())
    if shapes:
        shape = shapes.most_common(1)[0][0]
        record = next(record for record in state.loads.values() if record.shape == shape)
        return Target(store, state, record.model, record.model_revision, shape)
    newest = state.newest
    if newest is None:
        raise CliError(
            f"no engine of {store.keys.group} lives, and no map of it is kept", NOTHING_THERE
        )
    shape = ExpertShape(
        num_layers=len(newest.phy2log),
        num_experts=len(newest.copies[0]),
        num_slots=len(newest.phy2log[0]),
        num_ranks=newest.num_ranks,
    )
    return Target(store, state, newest.model, newest.model_revision, shape)
