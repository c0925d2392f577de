"""Runs the actions of `inferfleet placement`."""

import argparse
from typing import Any

from msgspec.structs import replace

from inferfleet_cli.errors import CONFLICT, NOTHING_THERE, REJECTED, CliError
from inferfleet_cli.etcd_action import author_of, run_connected
from inferfleet_cli.placement.group import Target, find_target, wait_counted, wait_settled
from inferfleet_cli.placement.map_files import maps_json, read_map, to_draft
from inferfleet_cli.placement.planning import draft_of, plan_for, plan_offline, shape_of
from inferfleet_cli.placement.tables import engines_text, history_text, map_text, plan_text
from services.common.etcd.client import Etcd
from services.engine.eplb.placement_map import PlacementMap, problem_with
from services.engine.eplb.placement_store import MapTooLargeError, now_ms


def perform(name: str, args: argparse.Namespace) -> int:
    """Run one action and return the exit status of the process."""
    if name == "plan" and args.loads and args.ranks and args.slots:
        return _plan_offline(args)
    action = {
        "get": _get,
        "plan": _plan,
        "set": _set,
        "history": _history,
        "rollback": _rollback,
    }[name]

    async def run(etcd: Etcd) -> int:
        return await action(args, await find_target(etcd, args.group))

    return run_connected(args, run)


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
    if not args.loads:
        target = await wait_counted(target)
    shape = shape_of(args, target.shape)
    plan, source = plan_for(args, target, shape)
    if args.json:
        print(maps_json(draft_of(plan, args, target, shape, **_origin(args))))
        return 0
    version = 0 if target.state.newest is None else target.state.newest.version
    title = f"{target.name}, version {version}, {source}"
    print(plan_text(plan, shape, title, every_layer=args.all))
    return 0


def _plan_offline(args: argparse.Namespace) -> int:
    plan, shape, table = plan_offline(args)
    if args.json:
        print(maps_json(table))
    else:
        print(plan_text(plan, shape, f"load of {args.loads}", every_layer=args.all))
    return 0


async def _set(args: argparse.Namespace, target: Target) -> int:
    if args.plan:
        if not args.loads:
            target = await wait_counted(target)
        plan, source = plan_for(args, target, target.shape)
        if plan.gain <= 0:
            print(f"nothing written: no other map balances the {source} better")
            return 0
        proposed = draft_of(plan, args, target, target.shape, **_origin(args))
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
        raise CliError(
            f"version {version} is not in the history; versions kept: {kept}", NOTHING_THERE
        )
    if state.current is not None and state.current.version == version:
        raise CliError(f"version {version} is the current map already")
    proposed = replace(
        state.history[version], version=0, policy=f"rollback to {version}", **_origin(args)
    )
    return await _write(args, target, proposed)


async def _write(args: argparse.Namespace, target: Target, proposed: PlacementMap) -> int:
    problem = problem_with(proposed, target.shape, target.model_revision, draft=True)
    if problem is not None:
        raise CliError(f"the map does not fit {target.name}: {problem}", REJECTED)
    try:
        written = await target.store.write(proposed, target.state)
    except MapTooLargeError as error:
        raise CliError(str(error), REJECTED) from error
    if written is None:
        raise CliError(
            "the map was changed meanwhile: check it with `inferfleet placement get`, and repeat"
            " this command if your map is still needed",
            CONFLICT,
        )
    print(f"{target.name}: version {written.version} written", flush=True)
    return await _report(args, target, written.version) if args.wait > 0 else 0


async def _report(args: argparse.Namespace, target: Target, version: int) -> int:
    """Wait for the engines and print which version each of them uses."""
    applied = await wait_settled(target.store, version, args.wait)
    print("\n".join(engines_text(applied)))
    if any(one.rejected and one.rejected.version >= version for one in applied.values()):
        raise CliError(
            f"version {version} was rejected; the engines keep the map before it", REJECTED
        )
    late = [name for name, one in sorted(applied.items()) if not one.settled(version)]
    if late:
        raise CliError(
            f"version {version} is not in use after {args.wait:g} s at {', '.join(late)}"
        )
    return 0


def _origin(args: argparse.Namespace) -> dict[str, Any]:
    return {"author": author_of(args), "created_unix_ms": now_ms()}
