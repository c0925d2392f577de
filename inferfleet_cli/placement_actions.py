"""What the `placement` commands do, once their arguments are read."""

import argparse
import asyncio
import getpass
import socket
from typing import Any

import numpy as np
from msgspec.structs import replace

from inferfleet_cli.errors import CliError
from inferfleet_cli.placement_files import read_load, read_map, to_draft
from inferfleet_cli.placement_group import (
    CONFLICT,
    NOTHING_THERE,
    REFUSED,
    Target,
    connected,
    find_target,
    wait_settled,
)
from inferfleet_cli.placement_text import engines_text, history_text, map_text, maps_json, plan_text
from services.engine.contract.runner import ExpertShape
from services.engine.eplb.placement_map import PlacementMap, problem_with
from services.engine.eplb.placement_store import MapTooLargeError, now_ms
from services.engine.eplb.planning import (
    Plan,
    PlanSettings,
    as_table,
    draft,
    make_plan,
    slots_in_use,
    sum_loads,
)
from services.engine.eplb.policy import PlacementShapeError


def perform(name: str, args: argparse.Namespace) -> int:
    """Run one action; returns the process's exit status."""
    if name == "plan" and args.loads and args.ranks and args.slots:
        return _plan_offline(args)
    action = {
        "get": _get,
        "plan": _plan,
        "set": _set,
        "history": _history,
        "rollback": _rollback,
    }[name]

    async def run() -> int:
        async with connected(args) as etcd:
            return await action(args, await find_target(etcd, args.group))

    return asyncio.run(run())


async def _get(args: argparse.Namespace, target: Target) -> int:
    if not args.json:
        print(map_text(target))
        return 0
    state = target.state
    whole = {
        "group": target.name,
        "map": state.current,
        "problem": state.problem,
        "leader": state.leader,
        "engines": [state.applied[name] for name in sorted(state.applied)],
    }
    print(maps_json(whole))
    return 0


async def _history(args: argparse.Namespace, target: Target) -> int:
    state = target.state
    if not state.history_versions:
        raise CliError(f"no map of {target.name} was ever set", NOTHING_THERE)
    if args.json:
        newest_first = [state.history[version] for version in sorted(state.history, reverse=True)]
        print(maps_json(newest_first))
    else:
        print(history_text(state))
    return 0


async def _plan(args: argparse.Namespace, target: Target) -> int:
    shape = _shape(args, target.shape)
    plan, tokens_from = _planned(args, target, shape)
    if args.json:
        print(maps_json(_draft_of(plan, args, target, shape)))
        return 0
    used = 0 if target.state.newest is None else target.state.newest.version
    title = f"{target.name}, version {used}, {tokens_from}"
    print(plan_text(plan, shape, title, every_layer=args.all))
    return 0


def _plan_offline(args: argparse.Namespace) -> int:
    load = read_load(args.loads)
    layers, experts = load.shape
    shape = ExpertShape(layers, experts, num_slots=args.slots, num_ranks=args.ranks)
    plan = _make_plan(args, load, shape, None)
    if args.json:
        found = {"phy2log": as_table(plan.new), "num_ranks": shape.num_ranks, "policy": args.policy}
        print(maps_json(found))
    else:
        print(plan_text(plan, shape, f"load of {args.loads}", every_layer=args.all))
    return 0


async def _set(args: argparse.Namespace, target: Target) -> int:
    if args.plan:
        plan, tokens_from = _planned(args, target, target.shape)
        if plan.gain <= 0:
            print(f"nothing written: no other map balances the {tokens_from} better")
            return 0
        proposed = _draft_of(plan, args, target, target.shape)
    else:
        file = read_map(args.file)
        proposed = to_draft(
            file,
            target.shape,
            model=target.model,
            model_revision=target.model_revision,
            **_origin(args),
        )
    return await _write(args, target, proposed)


async def _rollback(args: argparse.Namespace, target: Target) -> int:
    state, version = target.state, args.version
    if version not in state.history:
        kept = ", ".join(map(str, sorted(state.history))) or "none"
        raise CliError(f"version {version} is not kept; kept: {kept}", NOTHING_THERE)
    if state.current is not None and state.current.version == version:
        raise CliError(f"version {version} is the map that stands")
    proposed = replace(
        state.history[version], version=0, policy=f"rollback to {version}", **_origin(args)
    )
    return await _write(args, target, proposed)


async def _write(args: argparse.Namespace, target: Target, proposed: PlacementMap) -> int:
    problem = problem_with(proposed, target.shape, target.model_revision, draft=True)
    if problem is not None:
        raise CliError(f"the map does not fit {target.name}: {problem}", REFUSED)
    try:
        written = await target.store.write(proposed, target.state)
    except MapTooLargeError as error:
        raise CliError(str(error), REFUSED) from error
    if written is None:
        raise CliError(
            "somebody else wrote a map meanwhile: look at it with `inferfleet placement get`, and"
            " repeat the command if yours is still wanted",
            CONFLICT,
        )
    print(f"{target.name}: version {written.version} written", flush=True)
    return await _report(args, target, written.version) if args.wait > 0 else 0


async def _report(args: argparse.Namespace, target: Target, version: int) -> int:
    """Wait for the engines and say what became of the map."""
    applied = await wait_settled(target.store, version, args.wait)
    print("\n".join(engines_text(applied)))
    if any(one.rejected and one.rejected.version >= version for one in applied.values()):
        raise CliError(
            f"version {version} was refused; the engines go on with the map before it", REFUSED
        )
    late = [name for name, one in sorted(applied.items()) if not one.settled(version)]
    if late:
        raise CliError(f"after {args.wait:g} s not in use at: {', '.join(late)}")
    return 0


def _planned(args: argparse.Namespace, target: Target, shape: ExpertShape) -> tuple[Plan, str]:
    """A plan and, in words, where its load is from."""
    state = target.state
    if args.loads:
        load, tokens_from = read_load(args.loads), f"load of {args.loads}"
        if load.shape != (shape.num_layers, shape.num_experts):
            raise CliError(
                f"--loads: {args.loads} is for {load.shape[0]} layers of {load.shape[1]} experts,"
                f" the model has {shape.num_layers} of {shape.num_experts}",
                REFUSED,
            )
    else:
        load = sum_loads(state.loads.values(), target.shape, target.model_revision)
        engines = f"{len(state.loads)} engine{'s' if len(state.loads) > 1 else ''}"
        tokens_from = f"load of the last {_window(target)} rounds of {engines}"
        if not load.any():
            raise CliError(
                "the engines have counted no tokens yet: send requests, or give --loads",
                NOTHING_THERE,
            )
    return _make_plan(args, load, shape, target), tokens_from


def _make_plan(
    args: argparse.Namespace, load: Any, shape: ExpertShape, target: Target | None
) -> Plan:
    newest = None if target is None else target.state.newest
    settings = PlanSettings(policy=args.policy, groups=args.groups, nodes=args.nodes)
    try:
        if min(shape.num_ranks, shape.num_slots, args.groups, args.nodes) < 1:
            raise PlacementShapeError("ranks, slots, groups and nodes must be at least 1")
        old = slots_in_use(newest, shape, "" if target is None else target.model_revision)
        return make_plan(np.asarray(load, np.int64), old, shape, settings)
    except PlacementShapeError as error:
        raise CliError(f"cannot plan: {error}", 2) from error


def _draft_of(
    plan: Plan, args: argparse.Namespace, target: Target, shape: ExpertShape
) -> PlacementMap:
    return draft(
        plan,
        shape,
        model=target.model,
        model_revision=target.model_revision,
        window_rounds=0 if args.loads else _window(target),
        **_origin(args),
    )


def _window(target: Target) -> int:
    return max((record.window_rounds for record in target.state.loads.values()), default=0)


def _shape(args: argparse.Namespace, shape: ExpertShape) -> ExpertShape:
    return ExpertShape(
        shape.num_layers, shape.num_experts, args.slots or shape.num_slots,
        args.ranks or shape.num_ranks,
    )  # fmt: skip


def _origin(args: argparse.Namespace) -> dict[str, Any]:
    named = getattr(args, "author", "")
    try:
        author = named or f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):  # a user id without a name, as in containers
        author = socket.gethostname()
    return {"author": author, "created_unix_ms": now_ms()}
