"""Records that the kernels of DeepSeek V4 take; what they compute is in `kernels.reference.v4`.

All heads share one vector per position, which is key and value. A row attends to a window of the
latest positions, and to compressed entries, each of which stands for several positions.

Letters in shapes are those of `kernels.interface`; S sequences. D is the size of the shared vector.
"""

from dataclasses import dataclass

from torch import Tensor

from kernels.ragged import RaggedBatch


@dataclass(frozen=True, slots=True)
class Rings:
    """Where the sequences of a round keep the rows of their latest positions.

    Position p of a sequence is at place p mod L of its slot. A ring holds rows of earlier rounds
    until `keep` writes those of this one.
    """

    batch: RaggedBatch
    slots: Tensor
    """[S] int32: slot of each sequence."""


@dataclass(frozen=True, slots=True)
class Entries:
    """Compressed entries of a layer, in the blocks of the last positions that they stand for."""

    cache: Tensor
    """[blocks, entries per block, D]; those that this round completes are written already."""
    ratio: int
    """Positions that an entry stands for: a row sees those that end at its own or before."""
    block_size: int
    """Positions of a block."""
    chosen: Tensor | None = None
    """[T, k] int32: numbers of the entries that each row attends to, ascending, then -1. None: all
    that it sees."""
