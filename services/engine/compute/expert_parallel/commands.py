"""What rank 0 tells the other ranks.

A rank runs commands in their order, so what comes after `ApplyNext` uses the new map on all ranks.
"""

import msgspec

from services.engine.contract.config import EngineConfig
from services.engine.contract.runner import ExpertPlacement, ExpertShape


class Join(msgspec.Struct, tag=True, frozen=True):
    """The first command: load the experts of a rank and join the group."""

    config: EngineConfig
    shape: ExpertShape
    placement: ExpertPlacement
    rank: int
    store_path: str


class RunRound(msgspec.Struct, tag=True, frozen=True):
    """Serve the experts of all layers once."""


class BeginPlacement(msgspec.Struct, tag=True, frozen=True):
    """Prepare this map from now on; it was checked."""

    placement: ExpertPlacement


class PrepareNext(msgspec.Struct, tag=True, frozen=True):
    """Load one more expert of the map that was begun."""


class ApplyNext(msgspec.Struct, tag=True, frozen=True):
    """Use the map that was prepared."""


Command = Join | RunRound | BeginPlacement | PrepareNext | ApplyNext
