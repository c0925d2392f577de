"""Counts the tokens of each expert over the last rounds, for the placement policy."""

import numpy as np
from numpy.typing import NDArray

from services.engine.contract.runner import ExpertShape


class ExpertLoads:
    """Counts rows per physical slot in a round, and per logical expert in a window of rounds."""

    def __init__(self, shape: ExpertShape, window: int) -> None:
        """
        Args:
            window: number of rounds whose sum is reported.
        """
        self._round = np.zeros((shape.num_layers, shape.num_slots), np.int64)
        self._ring = np.zeros((window, shape.num_layers, shape.num_experts), np.int32)
        self._sum = np.zeros((shape.num_layers, shape.num_experts), np.int64)
        self._next = 0

    def count(self, layer: int, per_slot: NDArray[np.int64]) -> None:
        """Add the rows sent to each slot of a layer in this round, padding excluded.

        Args:
            per_slot: [slots].
        """
        self._round[layer] += per_slot

    def end_round(self, phy2log: NDArray[np.int64]) -> None:
        """End a round; the oldest round leaves the window.

        Args:
            phy2log: [layers, slots]: the logical expert in each slot during the round.
        """
        self.add_round(fold(self._round, phy2log, self._sum.shape[1]))
        self._round[:] = 0

    def add_round(self, per_expert: NDArray[np.int64]) -> None:
        """Add a whole round, [layers, logical experts]; the oldest one leaves the window."""
        self._sum += per_expert - self._ring[self._next]
        self._ring[self._next] = per_expert
        self._next = (self._next + 1) % len(self._ring)

    def clear(self) -> None:
        """Discard all counts."""
        for counts in (self._round, self._ring, self._sum):
            counts[:] = 0
        self._next = 0

    def total(self) -> tuple[tuple[int, ...], ...]:
        """Tokens in the window: [layers, logical experts]."""
        return tuple(tuple(row) for row in self._sum.tolist())


def fold(
    per_slot: NDArray[np.int64], phy2log: NDArray[np.int64], num_experts: int
) -> NDArray[np.int64]:
    """Add up the replicas of each expert: [layers, slots] to [layers, experts]."""
    folded = np.zeros((per_slot.shape[0], num_experts), np.int64)
    layers = np.arange(per_slot.shape[0])[:, None]
    np.add.at(folded, (layers, phy2log), per_slot)
    return folded
