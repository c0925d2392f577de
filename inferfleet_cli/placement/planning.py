"""Plans a map for `placement plan` and `placement set --plan`: the load, the shape, the plan."""

import argparse
from typing import Any

import numpy as np

from inferfleet_cli.errors import NOTHING_THERE, REJECTED, CliError
from inferfleet_cli.placement.group import Target
from inferfleet_cli.placement.map_files import read_load
from services.engine.contract.runner import ExpertShape
from services.engine.eplb.packing import Ints
from services.engine.eplb.placement_map import PlacementMap
from services.engine.eplb.planning import (
    Plan,
    PlanSettings,
    as_table,
    draft_map,
    make_plan,
    slots_in_use,
    sum_loads,
)
from services.engine.eplb.policy import PlacementShapeError


def plan_for(args: argparse.Namespace, target: Target, shape: ExpertShape) -> tuple[Plan, str]:
    """Plan a map for a group of engines; returns the plan and a description of its load.

    Raises:
        CliError: there is no load, it does not fit the model, or no map fits the shape.
    """
    if args.loads:
        load, source = _load_of_file(args.loads, shape), f"load of {args.loads}"
    else:
        load, source = _counted_load(target)
    return _make_plan(args, load, shape, target), source


def plan_offline(args: argparse.Namespace) -> tuple[Plan, ExpertShape, dict[str, Any]]:
    """Plan a map from the flags alone; returns the plan, its shape and the map for a file.

    Raises:
        CliError: the file of loads cannot be read, or no map fits the shape.
    """
    load = read_load(args.loads)
    layers, experts = load.shape
    shape = ExpertShape(layers, experts, num_slots=args.slots, num_ranks=args.ranks)
    plan = _make_plan(args, load, shape, None)
    table = {"phy2log": as_table(plan.new), "num_ranks": shape.num_ranks, "policy": args.policy}
    return plan, shape, table


def draft_of(
    plan: Plan, args: argparse.Namespace, target: Target, shape: ExpertShape, **origin: Any
) -> PlacementMap:
    """The planned map, without a version; `origin` has author and created_unix_ms."""
    return draft_map(
        plan,
        shape,
        model=target.model,
        model_revision=target.model_revision,
        window_rounds=0 if args.loads else _window_rounds(target),
        **origin,
    )


def shape_of(args: argparse.Namespace, shape: ExpertShape) -> ExpertShape:
    """The engines' shape with the --slots and --ranks flags applied."""
    return ExpertShape(
        shape.num_layers,
        shape.num_experts,
        args.slots or shape.num_slots,
        args.ranks or shape.num_ranks,
    )


def _load_of_file(path: str, shape: ExpertShape) -> Ints:
    load = read_load(path)
    if load.shape != (shape.num_layers, shape.num_experts):
        raise CliError(
            f"--loads: {path} is for {load.shape[0]} layers of {load.shape[1]} experts, but the"
            f" model has {shape.num_layers} layers of {shape.num_experts}",
            REJECTED,
        )
    return load


def _counted_load(target: Target) -> tuple[Ints, str]:
    state = target.state
    load = sum_loads(state.loads.values(), target.shape, target.model_revision)
    if not load.any():
        raise CliError(
            "the engines have counted no tokens yet: send requests, or give --loads", NOTHING_THERE
        )
    engines = f"{len(state.loads)} engine{'s' if len(state.loads) > 1 else ''}"
    return load, f"load of the last {_window_rounds(target)} rounds of {engines}"


def _make_plan(
    args: argparse.Namespace, load: Ints, shape: ExpertShape, target: Target | None
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


def _window_rounds(target: Target) -> int:
    return max((record.window_rounds for record in target.state.loads.values()), default=0)
