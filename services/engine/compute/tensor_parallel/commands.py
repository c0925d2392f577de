"""Commands from rank 0 to the other ranks, in the order in which rank 0 runs them itself."""

import msgspec

from services.engine.contract.config import EngineConfig
from services.engine.contract.runner import SequenceMetadata


class Join(msgspec.Struct, tag=True, frozen=True):
    """First command: load this rank's part of the model and join the other ranks."""

    config: EngineConfig
    rank: int
    store_path: str


class Allocate(msgspec.Struct, tag=True, frozen=True):
    """Allocate the KV-cache blocks."""

    num_blocks: int


class CopyBlocks(msgspec.Struct, tag=True, frozen=True):
    """Copy whole blocks."""

    pairs: tuple[tuple[int, int], ...]


class Forward(msgspec.Struct, tag=True, frozen=True):
    """Run the layers of one round."""

    batch: tuple[SequenceMetadata, ...]
    previous_tokens: tuple[int, ...] | None
    """Sampled tokens of the previous round; None if no row needs one."""


class Scrub(msgspec.Struct, tag=True, frozen=True):
    """Replace values that are not finite in all blocks."""


Command = Join | Allocate | CopyBlocks | Forward | Scrub
