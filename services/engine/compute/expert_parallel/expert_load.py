"""Tokens per expert over the last rounds: what a placement policy decides by."""

import numpy as np
from numpy.typing import NDArray

from services.engine.contract.runner import ExpertShape


class ExpertLoads:
    """Counts per physical slot in a round, kept per logical expert over a window of rounds."""

    def __init__(self, shape: ExpertShape, window: int) -> None:
        """
        Args:
            window: rounds whose sum is reported.
        """
        self._round = np.zeros((shape.num_layers, shape.num_slots), np.int64)
        self._ring = np.zeros((window, shape.num_layers, shape.num_experts), np.int32)
        self._sum = np.zeros((shape.num_layers, shape.num_experts), np.int64)
        self._next = 0

    def count(self, layer: int, per_slot: NDArray[np.int64]) -> None:
        """Add the rows sent to each slot of a layer in this round; padding is not among them."""
        self._round[layer] += per_slot

    def end_round(self, phy2log: NDArray[np.int64]) -> None:
        """Close a round in which this map was in use; the oldest round leaves the window.

        Args:
            phy2log: [layers, slots] the logical expert in each slot.
        """
        folded = fold(self._round, phy2log, self._sum.shape[1])
        self._sum += folded - self._ring[self._next]
        self._ring[self._next] = folded
        self._next = (self._next + 1) % len(self._ring)
        self._round[:] = 0

    def clear(self) -> None:
        """Forget all rounds: those before were no requests'."""
        for counts in (self._round, self._ring, self._sum):
            counts[:] = 0
        self._next = 0

    def total(self) -> tuple[tuple[int, ...], ...]:
        """[layers, logical experts] tokens in the window."""
        return tuple(tuple(row) for row in self._sum.tolist())


def fold(
    per_slot: NDArray[np.int64], phy2log: NDArray[np.int64], num_experts: int
) -> NDArray[np.int64]:
    """[layers, slots] to [layers, experts]: replicas of one expert added up."""
    folded = np.zeros((per_slot.shape[0], num_experts), np.int64)
    layers = np.arange(per_slot.shape[0])[:, None]
    np.add.at(folded, (layers, phy2log), per_slot)
    return folded
