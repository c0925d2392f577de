"""Embedding tables: rows are looked up in plain numbers, or in the file's quantized blocks."""

from typing import Protocol

import torch
from torch import Tensor


class Rows(Protocol):
    """A table [rows, columns] whose rows are looked up by index."""

    shape: tuple[int, ...]
    nbytes: int
    """Memory of the table, in bytes."""

    def __call__(self, ids: Tensor) -> Tensor:
        """Rows [T, columns], in the table's number format and on its device.

        Args:
            ids: [T] int64.
        """


class DenseRows:
    """A table of plain numbers, already in the model's number format and on its device."""

    def __init__(self, table: Tensor) -> None:
        self._table = table
        self.shape: tuple[int, ...] = tuple(table.shape)
        self.nbytes = table.nbytes

    def __call__(self, ids: Tensor) -> Tensor:
        return self._table.index_select(0, ids)


class ByteRows:
    """A table in GGUF's Q8_0: 32 values of 8 bits share one scale of 16 bits. CPU only.

    A row is bit-identical to that of the decoded table.
    """

    def __init__(self, scales: Tensor, quantized: Tensor, dtype: torch.dtype) -> None:
        """
        Args:
            scales: [rows, columns / 32, 1] float16.
            quantized: [rows, columns / 32, 32] int8.
            dtype: number format of the rows that a look-up returns.
        """
        self._scales = scales
        self._quantized = quantized
        self._dtype = dtype
        self.shape: tuple[int, ...] = (quantized.shape[0], quantized.shape[1] * quantized.shape[2])
        self.nbytes = scales.nbytes + quantized.nbytes

    def __call__(self, ids: Tensor) -> Tensor:
        quantized = self._quantized.index_select(0, ids).float()
        wide = quantized.mul_(self._scales.index_select(0, ids).float())
        return wide.view(len(ids), self.shape[1]).to(self._dtype)
