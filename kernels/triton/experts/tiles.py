"""Sizes of the tiles of grouped products, from a table by format and rows per expert."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tiles:
    """A program multiplies [rows, depth] by [depth, columns], step by step."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


_FLOAT32 = Tiles(16, 64, 32, 4, 2)
_DECODE = Tiles(16, 64, 128, 4, 4)
_FEW = Tiles(64, 128, 64, 4, 3)
_MANY = Tiles(128, 128, 64, 8, 3)
INVARIANT = _FEW
"""The tile of every round where a row's bits must not depend on the number of rows."""


def choose_tiles(
    dtype: torch.dtype, pairs: int, experts: int, *, coded: bool = False, invariant: bool = False
) -> Tiles:
    """The tile for `pairs` chosen rows that `experts` share, whichever expert has how many.

    Decodes are bound by reading weights: deep tiles, and as few rows as tensor cores take. Weights
    in codes need a second sum for each group: with the largest tile, registers would be spilled.
    """
    if dtype == torch.float32:
        return _FLOAT32
    if invariant:
        return INVARIANT
    if pairs <= 16 * experts:
        return _DECODE
    return _FEW if coded or pairs <= 128 * experts else _MANY
