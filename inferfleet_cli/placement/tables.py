"""Formats maps, plans and engines as the text that `placement` prints."""

import datetime
from collections.abc import Mapping

import numpy as np

from inferfleet_cli.placement.group import Target
from inferfleet_cli.table import table
from services.engine.contract.runner import ExpertShape
from services.engine.eplb.placement_map import Applied, PlacementMap
from services.engine.eplb.placement_store import GroupState
from services.engine.eplb.planning import Plan

_MAX_ROWS = 16


def map_text(target: Target) -> str:
    """The current map of a group and the engines that use it."""
    state, current = target.state, target.state.current
    lines = [f"group    {target.name}", f"shape    {shape_text(target.shape)}"]
    if current is not None:
        lines += [
            f"version  {current.version}, {_when(current)}, by {current.author}",
            f"policy   {current.policy}{_balance(current)}",
            f"copies   {_copies(current)}",
        ]
    elif state.problem:
        lines.append(f"version  unreadable: {state.problem}")
    else:
        lines.append("version  0: no map was set; each expert is in the slot of its id")
    lines += [f"leader   {state.leader}"] if state.leader else []
    return "\n".join([*lines, "", *engines_text(state.applied)])


def engines_text(applied: Mapping[str, Applied]) -> list[str]:
    """One line per engine: the version that it uses and the one that it rejected."""
    if not applied:
        return ["no engine of this group is registered"]
    rows = [
        (one.engine_id, one.version, _rejected(one))
        for one in sorted(applied.values(), key=lambda one: one.engine_id)
    ]
    return table(("engine", "uses", "rejected"), rows)


def history_text(state: GroupState) -> str:
    """One line per map, the newest first; * marks the current one."""
    current = None if state.current is None else state.current.version
    rows = []
    for version in reversed(state.history_versions):
        mark = " *" if version == current else ""
        kept = state.history.get(version)
        if kept is None:
            rows.append((f"{version}{mark}", "unreadable", "-", "-", "-"))
        else:
            balance = _balance(kept).removeprefix(", balance ") or "-"
            rows.append((f"{version}{mark}", _when(kept), kept.policy, balance, kept.author))
    return "\n".join(table(("version", "written", "policy", "balance", "author"), rows))


def plan_text(plan: Plan, shape: ExpertShape, title: str, *, every_layer: bool) -> str:
    """The balance of today's map and of the planned one, per layer.

    Without `every_layer` only the layers with the worst balance are shown.
    """
    layers = np.arange(len(plan.load))
    if not every_layer and len(layers) > _MAX_ROWS:
        layers = np.sort(np.argsort(plan.before, kind="stable")[:_MAX_ROWS])
    most = (plan.new[:, :, None] == np.arange(shape.num_experts)).sum(axis=1).max(axis=1)
    rows = [
        (
            layer,
            int(plan.load[layer].sum()),
            f"{plan.before[layer]:.3f}",
            f"{plan.after[layer]:.3f}",
            int(most[layer]),
            f"{plan.moved[layer]}/{shape.num_slots}",
        )
        for layer in layers
    ]
    total = (int(plan.load.sum()), f"{plan.before.mean():.3f}", f"{plan.after.mean():.3f}")
    moved = f"{plan.moved.sum()}/{plan.new.size}"
    head = ("layer", "tokens", "today", "tomorrow", "most copies", "slots that change")
    lines = [
        title,
        shape_text(shape),
        f"policy {plan.settings.policy}; balance is the mean load of a rank divided by the largest",
        "",
        *table(head, [*rows, ("all", *total, int(most.max()), moved)]),
    ]
    if len(layers) < len(plan.load):
        lines.append(
            f"({len(plan.load) - len(layers)} better balanced layers are hidden; --all shows them)"
        )
    lines.append(
        f"gain {plan.gain:.3f}; to write it: `inferfleet placement set --plan` with the same flags"
    )
    return "\n".join(lines)


def shape_text(shape: ExpertShape) -> str:
    return (
        f"{shape.num_layers} layers, {shape.num_experts} experts in {shape.num_slots} slots on "
        f"{shape.num_ranks} rank{'s' if shape.num_ranks > 1 else ''}"
    )


def _rejected(one: Applied) -> str:
    return "-" if one.rejected is None else f"{one.rejected.version}: {one.rejected.reason}"


def _when(placement: PlacementMap) -> str:
    moment = datetime.datetime.fromtimestamp(placement.created_unix_ms / 1000).astimezone()
    return moment.isoformat(sep=" ", timespec="seconds")


def _balance(placement: PlacementMap) -> str:
    before, after = placement.balance_before, placement.balance_after
    return "" if before is None or after is None else f", balance {before:.3f} → {after:.3f}"


def _copies(placement: PlacementMap) -> str:
    several = sum(count > 1 for row in placement.copies for count in row)
    most = max(count for row in placement.copies for count in row)
    return f"{several} experts (of all layers) have more than one, at most {most}"
