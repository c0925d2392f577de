"""What is kept of requests between rounds, as in V4 (`v4_modules/memory.py`), where V4.1 differs.

Only the layers that make compressed entries have history; the layers after them read the same. The
state has the latest tokens for look-ups, each layer's latest keys, and the rows of groups of two
that are still open.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.compute.models.cache_tensors import CacheTensor
from services.engine.compute.models.v4_modules.memory import StatePart
from services.engine.compute.models.v4_modules.round_plan import ring_length
from services.engine.contract.deepseek_v41 import DeepseekV41Config, V41Layer


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Of one layer. Block 0 and slot 0 belong to no request."""

    window: Tensor
    """State [slots, ring length, D]: keys, which are the values too."""
    rows: Tensor | None = None
    """State [slots, ring length, 2, D]: of a layer that makes entries of two positions, per
    position its values and its scores."""
    entries: Tensor | None = None
    """History [blocks, entries per block, D] that the layer reads; perhaps another one's."""
    keys: Tensor | None = None
    """History [blocks, entries per block, index D]: index keys of these entries."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Of the whole model."""

    tokens: Tensor
    """State [slots, ring length]: compressed token ids as float32, which holds them exactly."""
    layers: tuple[LayerMemory, ...]

    @property
    def states(self) -> tuple[Tensor, ...]:
        """All tensors of which a request has one slot."""
        rows = (layer.rows for layer in self.layers)
        windows = (layer.window for layer in self.layers)
        return (self.tokens, *windows, *(own for own in rows if own is not None))


def make_memory(
    config: DeepseekV41Config, states: Tensor, caches: Sequence[Tensor], *, drafts: int = 0
) -> Memory:
    """Views of the slots and blocks that the engine allocated.

    Args:
        states: uint8 [slots, bytes]: all state of a request is one line.
        caches: one per tensor of `cache_tensors`.
        drafts: positions that may be rejected after a round and computed again.
    """
    views, first = [], 0
    for part in _state_parts(config, drafts):
        views.append(part.view_in(states, first))
        first += part.nbytes
    tokens, rest = views[0], iter(views[1:])
    histories = iter(caches)
    layers: list[LayerMemory] = []
    for index, layer in enumerate(config.layers):
        window = next(rest)
        rows = next(rest) if _keeps_rows(index, layer) else None
        if layer.source is None:
            layers.append(LayerMemory(window))
        elif layer.source == index:
            layers.append(LayerMemory(window, rows, next(histories), next(histories)))
        else:
            source = layers[layer.source]
            layers.append(LayerMemory(window, None, source.entries, source.keys))
    return Memory(tokens, tuple(layers))


def cache_tensors(config: DeepseekV41Config) -> tuple[CacheTensor, ...]:
    """The history: of each layer that makes entries, these, then their index keys."""
    return tuple(
        CacheTensor(index, name, (width,), torch.float32, layer.ratio)
        for index, layer in enumerate(config.layers)
        if layer.source == index
        for name, width in (("entry", config.head_dim), ("index", config.index_dim))
    )


def state_bytes(config: DeepseekV41Config, *, drafts: int = 0) -> int:
    """Memory of one request's state in all layers, in bytes."""
    return sum(part.nbytes for part in _state_parts(config, drafts))


def _state_parts(config: DeepseekV41Config, drafts: int) -> list[StatePart]:
    """The latest tokens; then of each layer the window, and rows of open groups if it has them."""
    window = ring_length(config.window, drafts)
    parts = [StatePart((ring_length(config.engram.longest, drafts),))]
    for index, layer in enumerate(config.layers):
        parts.append(StatePart((window, config.head_dim)))
        if _keeps_rows(index, layer):
            parts.append(StatePart((ring_length(layer.ratio, drafts), 2, config.head_dim)))
    return parts


def _keeps_rows(index: int, layer: V41Layer) -> bool:
    return layer.source == index and layer.ratio > 1
