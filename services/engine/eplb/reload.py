"""What a placement must satisfy before any of it is loaded, and what changes from one to the next.

Pure functions over maps; who holds the weights is the expert bank's business.
"""

from collections import Counter

from services.engine.runner import ExpertPlacement, ExpertShape, PlacementRefusedError


def check_placement(
    placement: ExpertPlacement, shape: ExpertShape | None, model_revision: str
) -> None:
    """Refuse what does not fit.

    Raises:
        PlacementRefusedError: naming the layer, slot or expert.
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
