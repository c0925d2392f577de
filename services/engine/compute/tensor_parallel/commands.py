"""What rank 0 tells the other ranks, in the order in which it does the same itself."""

import msgspec

from services.engine.contract.config import EngineConfig
from services.engine.contract.runner import SequenceMetadata


class Join(msgspec.Struct, tag=True, frozen=True):
    """The first command: load a rank's part and meet the others."""

    config: EngineConfig
    rank: int
    store_path: str


class Allocate(msgspec.Struct, tag=True, frozen=True):
    """Make block tensors."""

    num_blocks: int


class CopyBlocks(msgspec.Struct, tag=True, frozen=True):
    """Copy whole blocks."""

    pairs: tuple[tuple[int, int], ...]


class Forward(msgspec.Struct, tag=True, frozen=True):
    """Run a round."""

    batch: tuple[SequenceMetadata, ...]
    drawn: tuple[int, ...] | None
    """Tokens of the round before; None if no row needs one."""


class Scrub(msgspec.Struct, tag=True, frozen=True):
    """Make all blocks finite."""


Command = Join | Allocate | CopyBlocks | Forward | Scrub
