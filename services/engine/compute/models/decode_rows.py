"""Keeps keys and values of decoding sequences contiguous, so that rounds need not gather them.

A sequence keeps its row from round to round, and every round appends one position to it. A sequence
that joins is copied from its blocks once. The blocks remain the primary copy: the rows can be
dropped at any time.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.interface import KeptRows
from services.engine.contract.runner import SequenceMetadata

POSITIONS = 8192
"""Rows times positions of the longest row, at most; spare rows may take as much again."""
BYTES = 1 << 30
"""Memory of all stores, spare rows included, at most: large models keep fewer positions."""
_STEP = 128
"""Positions that rows grow by; all rows are then copied again."""


class _Row(NamedTuple):
    """State of a row: whose it is, and what of that sequence is in it."""

    seq_id: int
    length: int
    """Positions in the row."""
    block: int
    """Block of the last position: a sequence with another block there was computed anew."""


class DecodeRows:
    """Owns the stores of all layers, in the caches' number format; used by the runner's thread."""

    def __init__(self, caches: Sequence[Tensor]) -> None:
        """Stores are allocated by the first `assign`.

        Args:
            caches: per layer, [blocks, block size, 2 G, D].
        """
        self._caches = tuple(caches)
        per_position = sum(cache[0, 0].nbytes for cache in caches)
        self.positions = self.nbytes(per_position) // (2 * per_position)
        """Rows times positions of the longest row, at most; see `fits`."""
        self._stores: dict[int, Tensor] = {}
        self._rows = self._capacity = 0
        self._states: list[_Row | None] = []
        """Per row; None: free."""

    @staticmethod
    def nbytes(bytes_per_position: int) -> int:
        """Memory of all stores in bytes, at most."""
        return min(2 * POSITIONS * bytes_per_position, BYTES)

    def fits(self, count: int, longest: int) -> bool:
        """Whether `count` sequences of at most `longest` positions can have rows together."""
        return count * _padded(longest) <= self.positions

    def drop(self) -> None:
        """Drop all rows: the next `assign` copies them from blocks."""
        self._stores = {}
        self._rows = self._capacity = 0
        self._states = []

    def assign(self, seqs: Sequence[SequenceMetadata]) -> tuple[list[SequenceMetadata], KeptRows]:
        """Assign rows to sequences that compute one position each.

        Returns:
            The sequences in the order of their rows, and the rows.
        """
        self._make_room(len(seqs), max(seq.seqlen_k for seq in seqs))
        placed = self._place(seqs)
        joined = []
        for row, seq in enumerate(placed):
            if seq.start and self._states[row] != self._state(seq, seq.start):
                table = torch.tensor(seq.block_table[: -(-seq.start // self._block)])
                joined.append((row, table, seq.start))
            self._states[row] = self._state(seq, seq.seqlen_k)
        kept = KeptRows(stores=self._stores, slots=self._slots(placed), joined=tuple(joined))
        return placed, kept

    @property
    def _block(self) -> int:
        return self._caches[0].shape[1]

    def _state(self, seq: SequenceMetadata, length: int) -> _Row:
        return _Row(seq.seq_id, length, seq.block_table[(length - 1) // self._block])

    def _make_room(self, count: int, longest: int) -> None:
        if count <= self._rows and longest <= self._capacity:
            return
        self.drop()
        self._rows = 1 << (count - 1).bit_length()
        self._capacity = _padded(longest)
        self._states = [None] * self._rows
        for cache in self._caches:
            heads, dim = cache.shape[2] // 2, cache.shape[3]
            # Zeros: positions not written yet have weight 0, but 0 times NaN is NaN.
            store = cache.new_zeros(2, self._rows, heads, self._capacity, dim)
            self._stores[cache.data_ptr()] = store

    def _place(self, seqs: Sequence[SequenceMetadata]) -> list[SequenceMetadata]:
        """Sort sequences by row: one with a row among the first keeps it, others fill the gaps."""
        rows = {
            state.seq_id: row
            for row, state in enumerate(self._states[: len(seqs)])
            if state is not None
        }
        placed = {rows[seq.seq_id]: seq for seq in seqs if seq.seq_id in rows}
        others = iter([seq for seq in seqs if seq.seq_id not in rows])
        return [placed[row] if row in placed else next(others) for row in range(len(seqs))]

    def _slots(self, placed: Sequence[SequenceMetadata]) -> Tensor:
        heads = self._caches[0].shape[2] // 2
        rows = torch.arange(len(placed)).view(-1, 1, 1)
        sides = torch.arange(2).view(1, 2, 1)
        ends = torch.tensor([seq.start for seq in placed]).view(-1, 1, 1)
        heads_of_rows = (sides * self._rows + rows) * heads + torch.arange(heads)
        return (heads_of_rows * self._capacity + ends).view(-1)


def _padded(length: int) -> int:
    return -(-length // _STEP) * _STEP
