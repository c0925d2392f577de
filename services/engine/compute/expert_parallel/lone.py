"""Experts of a process that holds all of them inside its compiled rounds."""

import contextlib

from torch import Tensor

from services.engine.compute.expert_parallel.expert_load import ExpertLoads
from services.engine.compute.models.moe import RunExperts
from services.engine.contract.expert_placement import check_placement, first_placement
from services.engine.contract.runner import (
    ExpertPlacement,
    ExpertShape,
    PlacementRefusedError,
)


class LoneExperts:
    """Checks and reports placements, and counts rows; `ExpertLeader` for one rank without slots.

    No placement moves weights or changes a result here: every expert has one slot, in this process.
    """

    nbytes = 0
    """The model counts its experts itself."""

    def __init__(self, shape: ExpertShape, model_revision: str, window: int) -> None:
        """
        Args:
            window: number of rounds over which rows are counted.
        """
        self.shape = shape
        self._revision = model_revision
        self._loads = ExpertLoads(shape, window)
        self.placement = first_placement(shape, model_revision)
        """The placement in use."""
        self._next: ExpertPlacement | None = None

    @property
    def run_experts(self) -> RunExperts | None:
        """What a layer calls; None where rounds are compiled."""
        return None

    def count_rows(self, rows: Tensor) -> None:
        """Count a round: rows of each expert, [layers with experts, experts] int64."""
        self._loads.add_round(rows.numpy())

    def loads(self) -> tuple[tuple[int, ...], ...]:
        """See Runner.expert_loads."""
        return self._loads.total()

    def clear_loads(self) -> None:
        """Discard the counts of all rounds so far."""
        self._loads.clear()

    def round(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to do around a round: there are no other ranks."""
        return contextlib.nullcontext()

    def prepare(self, placement: ExpertPlacement) -> bool:
        """See Runner.prepare_placement; there is nothing to load."""
        if placement != self._next:
            check_placement(placement, self.shape, self._revision)
            self._next = placement
        return True

    def apply(self, version: int) -> None:
        """See Runner.apply_placement."""
        if self._next is None or self._next.version != version:
            raise PlacementRefusedError(
                f"version {version} is not prepared: call prepare_placement until it returns True"
            )
        self.placement, self._next = self._next, None

    def check(self) -> None:
        """See Runner.check; no rank can have ended."""

    def close(self) -> None:
        """Nothing to end."""
