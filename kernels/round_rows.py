"""The interface of what makes a round's rows on the device, from what the host knows of it.

The host uploads token ids, lengths and block tables. Positions and slots follow from them, and the
last token of a sequence may be one that the round before drew: it never leaves the device.
"""

from typing import NamedTuple, Protocol

from torch import Tensor

from kernels.ragged import RaggedBatch


class RoundRows(NamedTuple):
    """What a model reads of each of T rows."""

    token_ids: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64."""
    slots: Tensor
    """[T] int64: block * block size + offset."""


class MakeRoundRows(Protocol):
    """Makes the rows of a round in one launch."""

    def __call__(
        self,
        tokens: Tensor,
        previous: Tensor,
        drawn: Tensor,
        batch: RaggedBatch,
        block_size: int,
    ) -> RoundRows:
        """Rows of the sequences of a batch; rows beyond the last sequence are 0.

        Args:
            tokens: [T] int32.
            previous: [S] int32: row of `drawn` that is the sequence's last token; -1: it is among
                `tokens`.
            drawn: [R] int64: tokens that the round before drew.
            batch: the sequences.
            block_size: positions of a block.

        Raises:
            ValueError: shapes, formats or strides do not fit; the message names the tensor.
        """


def check_round_rows(tokens: Tensor, previous: Tensor, drawn: Tensor, batch: RaggedBatch) -> None:
    """Check what `MakeRoundRows` is given.

    Raises:
        ValueError: see MakeRoundRows.
    """
    sequences = len(batch.lengths)
    expected = {
        "tokens": (tokens, "int32", (len(tokens),)),
        "previous": (previous, "int32", (sequences,)),
        "drawn": (drawn, "int64", (len(drawn),)),
        "query_starts": (batch.query_starts, "int32", (sequences + 1,)),
        "lengths": (batch.lengths, "int32", (sequences,)),
        "block_tables": (batch.block_tables, "int32", (sequences, batch.block_tables.shape[-1])),
    }
    for name, (tensor, dtype, shape) in expected.items():
        found = str(tensor.dtype).removeprefix("torch.")
        if tuple(tensor.shape) != shape or found != dtype or not tensor.is_contiguous():
            raise ValueError(
                f"round_rows: {name} must be contiguous {dtype} {shape}, got {found} "
                f"{tuple(tensor.shape)}"
            )
