"""The interface of attention over all sequences of a round in one call.

A ragged batch lists sequences of any number of rows, one after another, by tensors on the device.
So nothing is grouped on the host, no history is gathered, and no mask is built. A row's place
follows from the record: row r of sequence s stands at position lengths[s] - rows[s] + r and attends
to the positions up to its own.

Letters in shapes are those of `kernels.interface`; S sequences, W blocks per line of a table.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.latent import IndexQuery


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """The sequences of a round. The tensors are on the device, the numbers on the host.

    The host's numbers are bounds: they set the size of a launch and never a result. A sequence may
    have no rows (a padding line of a captured graph); then nothing of it is read.
    """

    query_starts: Tensor
    """[S + 1] int32: first row of each sequence, ascending from 0; the last element is the number
    of rows in use, at most T. Rows beyond it are padding: nothing is promised about their
    results."""
    lengths: Tensor
    """[S] int32: positions of each sequence, this round's rows included."""
    block_tables: Tensor
    """[S, W] int32: the blocks of each sequence in order. Only the first ceil(length / block size)
    of a line are read."""
    max_queries: int
    """No sequence has more rows; at least 1."""
    max_length: int
    """No sequence is longer."""
    num_decodes: int = 0
    """The first sequences, so many, have one row each; their rows are the first rows."""


class RaggedAttention(Protocol):
    """Attention of grouped query heads over paged keys and values."""

    def __call__(
        self,
        q: Tensor,
        cache: Tensor,
        batch: RaggedBatch,
        *,
        scale: float | None,
        window: int = 0,
        soft_cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """softmax(cap(scale * q k^T)) v over the positions up to each row's own.

        A row's result depends on its own sequence and position only: not on the batch, nor on how
        many rows its sequence has in this round, in all sets that promise fixed splits.

        Args:
            q: [T, H, D]; rows may be a slice of wider ones, elements are adjacent.
            cache: [blocks, block size, 2 G, D]: keys, then values, of each position; this round's
                are written already.
            batch: the sequences.
            scale: of the scores; None is 1 / sqrt(D).
            window: positions that a row attends to, its own included; 0 is all.
            soft_cap: scores become soft_cap * tanh(score / soft_cap); 0 leaves them.
            sinks: [H]: a score per head that joins the softmax and adds no value.

        Returns:
            [T, H * D] in the format of q.

        Raises:
            ValueError: shapes, formats, strides or devices do not fit; the message names the
                tensor.
        """


class RaggedLatentAttention(Protocol):
    """Attention over latent vectors (MLA), of all sequences of a round in one call."""

    def __call__(
        self,
        q: Tensor,
        cache: Tensor,
        batch: RaggedBatch,
        *,
        rank: int,
        scale: float,
        index: IndexQuery | None = None,
    ) -> Tensor:
        """As `kernels.latent.LatentKernels.attention`, with a batch instead of a group.

        Args:
            q: [T, H, width] in the latents' space.
            cache: [blocks, block size, width]; this round's latents are written already.
            batch: the sequences.
            rank: leading elements of a latent that are its value.
            scale: of the scores.
            index: chooses the positions of each row; None: all up to its own.

        Returns:
            [T, H, rank] in the format of q.

        Raises:
            ValueError: shapes, formats, strides or devices do not fit; the message names the
                tensor.
        """
