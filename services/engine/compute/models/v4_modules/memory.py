"""What is kept of requests between rounds: history by block, state by slot; and how much it takes.

The history grows with the request and is never changed: compressed entries and index keys, in the
block of the last position that they stand for. The state has a fixed size per request: a ring of
the latest keys per layer, and rings of the rows that will make the next compressed entries.
A slot or a block needs no clearing: rows that its request did not write are never read.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from services.engine.compute.models.v4_modules.round_plan import entries_per_block, ring_length
from services.engine.contract.deepseek_v4 import DeepseekV4Config, V4Layer

_ALIGNED = 8
"""Bytes; the parts of a state begin at multiples of it, whatever their number format."""


@dataclass(frozen=True, slots=True)
class CompressorMemory:
    """Of one compressor."""

    rows: Tensor
    """State [slots, ring length, 2, width] float32: per position its values and its scores."""
    entries: Tensor
    """History [blocks, entries per block, D]."""


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Of one layer. Block 0 and slot 0 belong to no request."""

    window: Tensor
    """State [slots, ring length, D]: keys, which are the values too."""
    main: CompressorMemory | None = None
    """None in a layer of kind "window"."""
    index: CompressorMemory | None = None
    """None in a layer that is not of kind "indexed"."""

    @property
    def states(self) -> tuple[Tensor, ...]:
        """All tensors of which a request has one slot."""
        rows = (part.rows for part in (self.main, self.index) if part)
        return (self.window, *rows)

    @property
    def histories(self) -> tuple[Tensor, ...]:
        """All tensors of which a request has some blocks."""
        return tuple(part.entries for part in (self.main, self.index) if part)


@dataclass(frozen=True, slots=True)
class V4Memory:
    """Of all layers."""

    states: Tensor
    """uint8 [slots, bytes]: all state of a request is one line, which the layers view in parts."""
    layers: tuple[LayerMemory, ...]

    def copy_states(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole slots, (source, target) each: snapshots, restarts from them, and forks."""
        _copy((self.states,), pairs)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, target) each, for copy-on-write."""
        _copy([tensor for layer in self.layers for tensor in layer.histories], pairs)


def allocate(
    config: DeepseekV4Config,
    *,
    num_blocks: int,
    block_size: int,
    num_slots: int,
    drafts: int = 0,
    dtype: torch.dtype = torch.float32,
) -> V4Memory:
    """Zeros for all layers.

    Args:
        num_blocks: history blocks, block 0 included.
        block_size: positions of a block; a multiple or a divisor of each ratio.
        num_slots: states, slot 0 included.
        drafts: positions that may be rejected after a round and computed again.
        dtype: number format of keys; rows of compressors are float32 in every format.

    Raises:
        ValueError: the block size does not fit a ratio.
    """
    size = state_bytes(config, drafts=drafts, dtype=dtype)
    states = torch.zeros(num_slots, size, dtype=torch.uint8)
    layers, first = [], 0
    for layer in config.layers:
        views = []
        for part in _state_parts(config, layer, drafts, dtype):
            views.append(part.view_in(states, first))
            first += part.nbytes
        compressors = [
            CompressorMemory(rows, torch.zeros(num_blocks, *entries, dtype=dtype))
            for rows, entries in zip(
                views[1:], _entry_shapes(config, layer, block_size), strict=True
            )
        ]
        layers.append(LayerMemory(views[0], *compressors))
    return V4Memory(states, tuple(layers))


def row_width(layer: V4Layer, width: int) -> int:
    """Elements of a compressor's row whose entries have `width` elements.

    Overlapping entries read each row twice, with other elements: once in the window after it.
    """
    return 2 * width if layer.kind == "indexed" else width


def state_bytes(
    config: DeepseekV4Config, *, drafts: int = 0, dtype: torch.dtype = torch.float32
) -> int:
    """Memory of one request's state in all layers, in bytes."""
    return sum(
        part.nbytes
        for layer in config.layers
        for part in _state_parts(config, layer, drafts, dtype)
    )


def history_bytes(
    config: DeepseekV4Config, block_size: int, *, dtype: torch.dtype = torch.float32
) -> int:
    """Memory of one history block in all layers, in bytes.

    Raises:
        ValueError: the block size does not fit a ratio.
    """
    shapes = [
        shape for layer in config.layers for shape in _entry_shapes(config, layer, block_size)
    ]
    return sum(math.prod(shape) for shape in shapes) * dtype.itemsize


class _Part(NamedTuple):
    """A tensor within a request's state."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that it takes, so that the next part begins at a multiple of _ALIGNED."""
        return -(-math.prod(self.shape) * self.dtype.itemsize // _ALIGNED) * _ALIGNED

    def view_in(self, states: Tensor, first: int) -> Tensor:
        """Its tensor [slots, *shape] in the lines of all states, from this byte on."""
        used = math.prod(self.shape) * self.dtype.itemsize
        return states[:, first : first + used].view(self.dtype).view(len(states), *self.shape)


def _state_parts(
    config: DeepseekV4Config, layer: V4Layer, drafts: int, dtype: torch.dtype
) -> list[_Part]:
    """The window, then the rows of each compressor."""
    parts = [_Part((ring_length(config.window, drafts), config.head_dim), dtype)]
    for width in _entry_widths(config, layer):
        rows = (ring_length(layer.span, drafts), 2, row_width(layer, width))
        parts.append(_Part(rows, torch.float32))
    return parts


def _entry_shapes(
    config: DeepseekV4Config, layer: V4Layer, block_size: int
) -> list[tuple[int, int]]:
    """What one block holds of each compressor: [entries, D]."""
    widths = _entry_widths(config, layer)
    return [(entries_per_block(layer.ratio, block_size), width) for width in widths]


def _entry_widths(config: DeepseekV4Config, layer: V4Layer) -> tuple[int, ...]:
    """Elements of an entry of each compressor: of keys, and of index keys."""
    match layer.kind:
        case "window":
            return ()
        case "dense":
            return (config.head_dim,)
        case "indexed":
            return (config.head_dim, config.index_dim)


def _copy(tensors: Sequence[Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    if not pairs:
        return
    sources, targets = (torch.tensor(side) for side in zip(*pairs, strict=True))
    for tensor in tensors:
        tensor.index_copy_(0, targets, tensor.index_select(0, sources))
