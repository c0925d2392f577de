"""Rows of a round by sequence, as compiled rounds read them; imports nothing that compiles."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Spans:
    """Which rows of a round belong to which sequence; all int64."""

    seqs: Tensor
    """[sequences, 3]: first row, rows, positions that were computed before."""
    tables: Tensor
    """[sequences, blocks]."""
