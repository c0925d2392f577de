"""Sizes of tiles by head size. They decide a row's bits, so they depend on the model alone."""

from dataclasses import dataclass

import triton

SPLIT = 512
"""Positions of one split (ADR 0007)."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How much one program computes."""

    rows: int
    """Rows of a product: query rows times query heads of one key head. Hopper's matrix
    instructions take no fewer than 64, so a decode's 64 rows cost it no more than 16 would."""
    positions: int
    """Positions of one step; SPLIT is a multiple."""
    warps: int
    stages: int
    """Tiles of keys and values in flight."""


_BY_DIM = {
    16: Tiles(rows=64, positions=64, warps=4, stages=3),
    32: Tiles(rows=64, positions=64, warps=4, stages=3),
    64: Tiles(rows=64, positions=64, warps=4, stages=3),
    128: Tiles(rows=64, positions=64, warps=4, stages=2),
    256: Tiles(rows=64, positions=32, warps=8, stages=2),
}
_WIDE = {128: Tiles(rows=64, positions=32, warps=8, stages=2)}
"""For float32, whose tiles take twice the memory."""


def tiles_for(dim: int, element_bytes: int) -> tuple[Tiles, int]:
    """Tiles for heads of `dim` elements, and the padded head size.

    Raises:
        ValueError: the head is too large.
    """
    padded = max(16, triton.next_power_of_2(dim))
    if padded not in _BY_DIM or (padded == 256 and element_bytes == 4):
        raise ValueError(
            f"ragged attention: head size {dim} in {element_bytes} bytes per element is too "
            "large; at most 256 in 2 bytes or 128 in 4"
        )
    if element_bytes == 4:
        return _WIDE.get(padded, _BY_DIM[padded]), padded
    return _BY_DIM[padded], padded
