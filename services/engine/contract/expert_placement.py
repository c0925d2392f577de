"""Pure functions of expert placements: checks, the initial placement, experts of a rank.

The weights are loaded by `compute/expert_parallel`.
"""

from collections import Counter

from services.engine.contract.runner import ExpertPlacement, ExpertShape, PlacementRefusedError


def check_placement(
    placement: ExpertPlacement, shape: ExpertShape | None, model_revision: str
) -> None:
    """Refuse a placement that does not fit the engine.

    Raises:
        PlacementRefusedError: the message names the layer, slot or expert.
    """
    if shape is None:
        raise PlacementRefusedError("the model has no experts")
    if placement.version < 1:
        raise PlacementRefusedError(f"version {placement.version} is below 1")
    if placement.model_revision != model_revision:
        raise PlacementRefusedError(
            f"it is for model revision {placement.model_revision!r}, not {model_revision!r}"
        )
    if len(placement.phy2log) != shape.num_layers:
        raise PlacementRefusedError(
            f"it has {len(placement.phy2log)} layers, the model has {shape.num_layers} with experts"
        )
    for layer, row in enumerate(placement.phy2log):
        _check_layer(layer, row, shape)


def _check_layer(layer: int, row: tuple[int, ...], shape: ExpertShape) -> None:
    if len(row) != shape.num_slots:
        raise PlacementRefusedError(
            f"layer {layer} has {len(row)} slots, the engine has {shape.num_slots}"
        )
    for slot, expert in enumerate(row):
        if not 0 <= expert < shape.num_experts:
            raise PlacementRefusedError(
                f"layer {layer}, slot {slot}: there is no expert {expert}, only 0 to "
                f"{shape.num_experts - 1}"
            )
    present = Counter(row)
    for expert in range(shape.num_experts):
        if not present[expert]:
            raise PlacementRefusedError(f"layer {layer}: expert {expert} has no slot")


def first_placement(shape: ExpertShape, model_revision: str) -> ExpertPlacement:
    """Version 0: expert e is in slot e; redundant slots are filled from expert 0 on."""
    row = tuple(slot % shape.num_experts for slot in range(shape.num_slots))
    return ExpertPlacement(0, (row,) * shape.num_layers, model_revision)


def rank_experts(
    placement: ExpertPlacement, shape: ExpertShape, rank: int
) -> tuple[tuple[int, ...], ...]:
    """The logical experts in a rank's slots, [layers][local slots]."""
    each = shape.num_slots // shape.num_ranks
    own = slice(rank * each, (rank + 1) * each)
    return tuple(row[own] for row in placement.phy2log)


def missing_experts(
    old: ExpertPlacement, new: ExpertPlacement, shape: ExpertShape, rank: int
) -> tuple[tuple[int, int], ...]:
    """Pairs (layer, expert) that a rank holds under `new` and not under `old`, in order."""
    layers = zip(rank_experts(old, shape, rank), rank_experts(new, shape, rank), strict=True)
    return tuple(
        (layer, expert)
        for layer, (held, wanted) in enumerate(layers)
        for expert in sorted(set(wanted) - set(held))
    )
