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

from services.engine.compute.models.cache_tensors import CacheTensor
from services.engine.compute.models.v4_modules.round_plan import ring_length
from services.engine.contract.deepseek_v4 import DeepseekV4Config, V4Layer


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


def layer_memories(
    config: DeepseekV4Config, states: Tensor, caches: Sequence[Tensor], *, drafts: int = 0
) -> tuple[LayerMemory, ...]:
    """All layers' views of the slots and blocks that the engine allocated.

    Args:
        states: uint8 [slots, bytes]: all state of a request is one line.
        caches: one per tensor of `cache_tensors`.
        drafts: positions that may be rejected after a round and computed again.
    """
    layers, first, rest = [], 0, iter(caches)
    for layer in config.layers:
        views = []
        for part in _state_parts(config, layer, drafts):
            views.append(part.view_in(states, first))
            first += part.nbytes
        compressors = [CompressorMemory(rows, next(rest)) for rows in views[1:]]
        layers.append(LayerMemory(views[0], *compressors))
    return tuple(layers)


def cache_tensors(config: DeepseekV4Config) -> tuple[CacheTensor, ...]:
    """The history: of each compressed layer its entries, then the indexer's keys."""
    return tuple(
        CacheTensor(number, name, (width,), torch.float32, layer.ratio)
        for number, layer in enumerate(config.layers)
        for name, width in zip(("entry", "index"), _entry_widths(config, layer), strict=False)
    )


def row_width(layer: V4Layer, width: int) -> int:
    """Elements of a compressor's row whose entries have `width` elements.

    Overlapping entries read each row twice, with other elements: once in the window after it.
    """
    return 2 * width if layer.kind == "indexed" else width


def state_bytes(config: DeepseekV4Config, *, drafts: int = 0) -> int:
    """Memory of one request's state in all layers, in bytes."""
    return sum(
        part.nbytes for layer in config.layers for part in _state_parts(config, layer, drafts)
    )


class StatePart(NamedTuple):
    """A float32 tensor within a request's state."""

    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return math.prod(self.shape) * torch.float32.itemsize

    def view_in(self, states: Tensor, first: int) -> Tensor:
        """Its tensor [slots, *shape] in the lines of all states, from this byte on."""
        part = states[:, first : first + self.nbytes].view(torch.float32)
        return part.view(len(states), *self.shape)


def _state_parts(config: DeepseekV4Config, layer: V4Layer, drafts: int) -> list[StatePart]:
    """The window, then the rows of each compressor."""
    parts = [StatePart((ring_length(config.window, drafts), config.head_dim))]
    for width in _entry_widths(config, layer):
        parts.append(StatePart((ring_length(layer.span, drafts), 2, row_width(layer, width))))
    return parts


def _entry_widths(config: DeepseekV4Config, layer: V4Layer) -> tuple[int, ...]:
    """Elements of an entry of each compressor: of keys, and of index keys."""
    match layer.kind:
        case "window":
            return ()
        case "dense":
            return (config.head_dim,)
        case "indexed":
            return (config.head_dim, config.index_dim)
