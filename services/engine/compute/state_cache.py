"""`StateCache`: the slots of fixed-size state on the device, as bytes; it knows no layout.

A model that keeps state declares a `StateBlock` and views the slots as it needs them. Clearing and
copying whole slots needs no model: a slot of zeros is the state before position 0.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from services.engine.contract.runner import StateBlock, StateReplay


@runtime_checkable
class StatefulModel(Protocol):
    """What a model with fixed-size state has beside `registry.Model`."""

    @property
    def state_block(self) -> StateBlock:
        """Size and boundary of the state of one sequence."""

    @property
    def state_replay(self) -> StateReplay | None:
        """How the state is rebuilt without a snapshot; None if it cannot be."""

    def use_states(self, slots: Tensor) -> None:
        """Keep the slots, uint8 [slots, bytes], for `forward`; `SequenceMetadata.state_slot` is a
        row of it. Called again with other slots after memory was measured."""


class StateCache:
    """Slots of one model; used by the runner's thread."""

    def __init__(self, block: StateBlock, num_states: int, device: torch.device) -> None:
        """Allocate the slots, filled with zeros.

        Args:
            num_states: slot 0 included.
        """
        self.slots = torch.zeros(num_states, block.nbytes, dtype=torch.uint8, device=device)
        """uint8 [slots, bytes]."""

    def clear(self, slots: Sequence[int]) -> None:
        """See `Runner.clear_states`."""
        self.slots.index_fill_(0, self._ids(slots), 0)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `Runner.copy_states`."""
        for source, target in pairs:  # in place: a gather would need as much memory again
            self.slots[target].copy_(self.slots[source])

    def _ids(self, slots: Sequence[int]) -> Tensor:
        return torch.tensor(slots, dtype=torch.long, device=self.slots.device)
