"""Which tensors a model's KV cache is made of: per layer, what it stores for every position.

A model declares them (`registry.Model.cache_tensors`). Allocation, copies, clearing, the size of a
block and the name of the layout follow from the declaration.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from services.engine.contract.model_config import MlaConfig, ModelConfig

KEYS_AND_VALUES = "kv"
"""Name of a tensor whose rows are keys, then values, of all key heads."""


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """One tensor of one layer: [blocks, rows of a block, *row], allocated with zeros."""

    layer: int
    name: str
    """What the rows are, e.g. KEYS_AND_VALUES; a layer has one tensor of a name."""
    row: tuple[int, ...]
    """Elements of one row."""
    dtype: torch.dtype
    positions: int = 1
    """Positions that share a row: it is in the block of the last of them."""

    def shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Of the tensor for blocks of so many positions."""
        return (num_blocks, rows_per_block(self.positions, block_size), *self.row)

    def nbytes(self, num_blocks: int, block_size: int) -> int:
        """Memory of so many blocks, in bytes."""
        return math.prod(self.shape(num_blocks, block_size)) * self.dtype.itemsize


def rows_per_block(positions: int, block_size: int) -> int:
    """Rows that a block of `block_size` positions holds, of which each stands for `positions`.

    A block that is shorter has room for the one row that may end in it.

    Raises:
        ValueError: neither number divides the other.
    """
    if block_size % positions and positions % block_size:
        raise ValueError(
            f"block_size is {block_size}, it must be a multiple or a divisor of {positions}, the "
            "positions of one compressed entry of the model"
        )
    return max(1, block_size // positions)


def keys_and_values(config: ModelConfig, dtype: torch.dtype) -> tuple[CacheTensor, ...]:
    """The tensors of grouped-query attention: one per layer, with rows [2 G, D]."""
    row = (2 * config.num_kv_heads, config.head_dim)
    return tuple(
        CacheTensor(layer, KEYS_AND_VALUES, row, dtype) for layer in range(config.num_layers)
    )


def latents(config: ModelConfig, mla: MlaConfig, dtype: torch.dtype) -> tuple[CacheTensor, ...]:
    """The tensors of latent attention: of each layer the latents, then the indexer's keys."""
    rows = {"latent": (mla.kv_rank + mla.rope_dim,)}
    if mla.index is not None:
        rows["index"] = (mla.index.dim,)
    return tuple(
        CacheTensor(layer, name, row, dtype)
        for layer in range(config.num_layers)
        for name, row in rows.items()
    )


def block_bytes(tensors: Sequence[CacheTensor], block_size: int) -> int:
    """Memory of one block in all tensors, in bytes.

    Args:
        block_size: positions of a block.
    """
    return sum(tensor.nbytes(1, block_size) for tensor in tensors)


def blocks_not_finite(cache: Tensor) -> set[int]:
    """Blocks of a tensor [blocks, ...] that have a value that is not finite."""
    inner = tuple(range(1, cache.dim()))  # not a copy of the tensor; amin and amax of NaN are NaN
    finite = cache.amin(inner).isfinite() & cache.amax(inner).isfinite()
    return set((~finite).nonzero().flatten().tolist())


def layout_name(tensors: Sequence[CacheTensor]) -> str:
    """Name of the layout, for `RunnerInfo.kv_layout`: two layouts of a model differ in it.

    It reads `paged/LAYERSx2GxD/FORMAT` for keys and values; other tensors have their name before
    their size, and behind it the positions of a row if they are more than one; kinds of tensors are
    joined by `+`.
    """
    kinds = sorted(
        (tensor.name, tensor.row, str(tensor.dtype), tensor.positions) for tensor in tensors
    )
    parts = []
    for (name, row, dtype, positions), same in groupby(kinds):
        sizes = "x".join(str(size) for size in row) + (f"per{positions}" if positions > 1 else "")
        own = sizes if name == KEYS_AND_VALUES else f"{name}{sizes}"
        parts.append(f"{len(list(same))}x{own}/{dtype.removeprefix('torch.')}")
    return f"paged/{'+'.join(parts)}"


def write_rows(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Store rows of one position each, in place.

    Args:
        cache: [blocks, block size, width].
        rows: [T, width].
        slots: [T] int64: block * block size + offset.
    """
    cache.view(-1, cache.shape[-1]).index_copy_(0, slots, rows)
