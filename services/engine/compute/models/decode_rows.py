"""Who sits in which row of the kept keys and values: decodes need no gathering while they stay.

A sequence keeps its row from round to round; a round appends one position to each. What joins is
copied from its blocks once. The blocks stay the truth: all of this may be forgotten at any time.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.interface import KeptRows
from services.engine.contract.runner import SequenceMetadata

POSITIONS = 8192
"""Rows times positions of the longest that one round keeps; spare rows may take as much again."""
BYTES = 1 << 30
"""Most that all stores may take, spare rows included: of large models fewer positions are kept."""
_STEP = 128
"""Positions that a row grows by: all rows are copied anew then."""


class DecodeRows:
    """Owns the stores of all layers, in the caches' number format; used by the runner's thread."""

    def __init__(self, caches: Sequence[Tensor]) -> None:
        """Allocate nothing yet.

        Args:
            caches: per layer, [blocks, block, 2 G, D].
        """
        self._caches = tuple(caches)
        per_position = sum(cache[0, 0].nbytes for cache in caches)
        self.positions = self.nbytes(per_position) // (2 * per_position)
        """Bound of rows times positions of the longest, as `fits` counts them."""
        self._stores: dict[int, Tensor] = {}
        self._rows = self._capacity = 0
        self._seated: list[tuple[int, int, int]] = []
        """Per row: whose it is, how many positions of it are there, and the last one's block."""

    @staticmethod
    def nbytes(bytes_per_position: int) -> int:
        """Most that all stores take."""
        return min(2 * POSITIONS * bytes_per_position, BYTES)

    def fits(self, count: int, longest: int) -> bool:
        """Whether so many sequences can be seated together."""
        return count * _padded(longest) <= self.positions

    def forget(self) -> None:
        """Nothing that is kept may be used again."""
        self._stores = {}
        self._rows = self._capacity = 0
        self._seated = []

    def seat(self, seqs: Sequence[SequenceMetadata]) -> tuple[list[SequenceMetadata], KeptRows]:
        """Rows for sequences that compute one position each, and the order of their rows."""
        self._make_room(len(seqs), max(seq.seqlen_k for seq in seqs))
        seated = self._assign(seqs)
        joined = []
        for row, seq in enumerate(seated):
            if seq.start and self._seated[row] != self._seat(seq, seq.start):
                table = torch.tensor(seq.block_table[: -(-seq.start // self._block)])
                joined.append((row, table, seq.start))
            self._seated[row] = self._seat(seq, seq.seqlen_k)
        kept = KeptRows(stores=self._stores, slots=self._slots(seated), joined=tuple(joined))
        return seated, kept

    @property
    def _block(self) -> int:
        return self._caches[0].shape[1]

    def _seat(self, seq: SequenceMetadata, length: int) -> tuple[int, int, int]:
        return seq.seq_id, length, seq.block_table[(length - 1) // self._block]

    def _make_room(self, count: int, longest: int) -> None:
        if count <= self._rows and longest <= self._capacity:
            return
        self.forget()
        self._rows = 1 << (count - 1).bit_length()
        self._capacity = _padded(longest)
        self._seated = [(-1, 0, 0)] * self._rows
        for cache in self._caches:
            heads, dim = cache.shape[2] // 2, cache.shape[3]
            # Zeros: what is not written yet gets weight 0, and 0 times NaN is NaN.
            store = cache.new_zeros(2, self._rows, heads, self._capacity, dim)
            self._stores[cache.data_ptr()] = store

    def _assign(self, seqs: Sequence[SequenceMetadata]) -> list[SequenceMetadata]:
        """Who has a row among the first keeps it; the others fill the gaps."""
        rows = {seat[0]: row for row, seat in enumerate(self._seated[: len(seqs)])}
        placed = {rows[seq.seq_id]: seq for seq in seqs if seq.seq_id in rows}
        others = iter([seq for seq in seqs if seq.seq_id not in rows])
        return [placed[row] if row in placed else next(others) for row in range(len(seqs))]

    def _slots(self, seated: Sequence[SequenceMetadata]) -> Tensor:
        heads = self._caches[0].shape[2] // 2
        rows = torch.arange(len(seated)).view(-1, 1, 1)
        sides = torch.arange(2).view(1, 2, 1)
        ends = torch.tensor([seq.start for seq in seated]).view(-1, 1, 1)
        places = (sides * self._rows + rows) * heads + torch.arange(heads)
        return (places * self._capacity + ends).view(-1)


def _padded(length: int) -> int:
    return -(-length // _STEP) * _STEP
