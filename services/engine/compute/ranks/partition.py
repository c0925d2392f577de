"""The interface between a model runner and the way in which a model is split over ranks."""

from typing import Protocol

from kernels.interface import Kernels
from services.engine.compute.loader import ModelSource


class Partition(Protocol):
    """The part of a model that this rank holds."""

    rank: int

    def part_of(self, source: ModelSource) -> ModelSource:
        """This rank's configuration and weights, from those of the whole model.

        Raises:
            ConfigError: the model cannot be split over this many ranks.
        """

    def kernels(self, whole: Kernels) -> Kernels:
        """The kernel set with sums over ranks where a product needs them."""
