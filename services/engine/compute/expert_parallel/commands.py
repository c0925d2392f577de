"""Commands from rank 0 to the other ranks.

A rank runs commands in order, so all ranks use the new placement after `ApplyNext`.
"""

import msgspec

from services.engine.contract.config import EngineConfig
from services.engine.contract.runner import ExpertPlacement, ExpertShape


class Join(msgspec.Struct, tag=True, frozen=True):
    """First command: load this rank's experts and join the group."""

    config: EngineConfig
    shape: ExpertShape
    placement: ExpertPlacement
    rank: int
    store_path: str


class RunRound(msgspec.Struct, tag=True, frozen=True):
    """Run the experts of all layers for one round."""


class BeginPlacement(msgspec.Struct, tag=True, frozen=True):
    """Make this the next placement; rank 0 has checked it."""

    placement: ExpertPlacement


class PrepareNext(msgspec.Struct, tag=True, frozen=True):
    """Load one more expert of the next placement."""


class ApplyNext(msgspec.Struct, tag=True, frozen=True):
    """Use the next placement, which is prepared."""


Command = Join | RunRound | BeginPlacement | PrepareNext | ApplyNext
