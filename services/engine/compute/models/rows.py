"""Embeddings: a table whose rows are looked up, as plain numbers or in a file's own blocks."""

from typing import Protocol

import torch
from torch import Tensor


class Rows(Protocol):
    """A table [rows, columns] of which few rows are wanted at a time."""

    shape: tuple[int, ...]
    nbytes: int
    """Memory that it holds."""

    def __call__(self, ids: Tensor) -> Tensor:
        """[T, columns], in the number format and on the device that the table was made for.

        Args:
            ids: [T] int64.
        """


class DenseRows:
    """A table of plain numbers, already in its format and place."""

    def __init__(self, table: Tensor) -> None:
        self._table = table
        self.shape: tuple[int, ...] = tuple(table.shape)
        self.nbytes = table.nbytes

    def __call__(self, ids: Tensor) -> Tensor:
        return self._table.index_select(0, ids)


class ByteRows:
    """Rows of GGUF's Q8_0: 32 levels of 8 bits share one scale of 16 bits (CPU only).

    A row is the same, bit for bit, as one of the decoded table.
    """

    def __init__(self, scales: Tensor, levels: Tensor, dtype: torch.dtype) -> None:
        """Keep the parts.

        Args:
            scales: [rows, columns / 32, 1] float16.
            levels: [rows, columns / 32, 32] int8.
            dtype: of what is looked up.
        """
        self._scales = scales
        self._levels = levels
        self._dtype = dtype
        self.shape: tuple[int, ...] = (levels.shape[0], levels.shape[1] * levels.shape[2])
        self.nbytes = scales.nbytes + levels.nbytes

    def __call__(self, ids: Tensor) -> Tensor:
        levels = self._levels.index_select(0, ids).float()
        wide = levels.mul_(self._scales.index_select(0, ids).float())
        return wide.view(len(ids), self.shape[1]).to(self._dtype)
