"""`DeepseekV41Config`: the shape of a DeepSeek V4.1 text model, read from config.json, checked."""

from dataclasses import dataclass

from services.engine.contract.deepseek_v4 import DeepseekSizes
from services.engine.contract.model_config import ModelFileError

MOST_IDS = 1 << 24
"""Compressed token ids are kept as float32, which holds whole numbers below this exactly."""


@dataclass(frozen=True, slots=True)
class V41Layer:
    """What one layer is made of beside its window, its experts and its hyper-connections."""

    ratio: int = 0
    """Positions that one compressed entry stands for, 1 or 2; 0: the window is all."""
    source: int | None = None
    """The layer whose compressed entries it reads, perhaps itself; None where the window is all."""
    chooses: bool = False
    """It chooses the entries that it and the layers after it attend to; others take the choice of
    the last one that did."""


@dataclass(frozen=True, slots=True)
class EngramTable:
    """How one layer finds rows in its table: by hashes of the last tokens."""

    layer: int
    factors: tuple[int, ...]
    """One odd number for each token of the longest n-gram, the latest token first."""
    primes: tuple[tuple[int, ...], ...]
    """By n-gram, those of two tokens first, then by head: rows of its part of the table."""

    @property
    def num_rows(self) -> int:
        """Rows of the whole table."""
        return sum(map(sum, self.primes))

    @property
    def lookups(self) -> int:
        """Rows that are looked up for each position."""
        return sum(map(len, self.primes))


@dataclass(frozen=True, slots=True)
class EngramConfig:
    """The look-ups by n-gram."""

    tables: tuple[EngramTable, ...]
    head_dim: int
    """Elements of a row of a table."""
    longest: int
    """Tokens of the longest n-gram."""
    pad_token: int
    """Token that stands for what is before the first position."""
    num_ids: int
    """Compressed token ids: tokens whose texts count as equal share one."""
    ids: tuple[int, ...] = ()
    """By token: its compressed id. Empty until the tokenizer was read, which takes a second."""

    def table(self, layer: int) -> EngramTable | None:
        """The table of a layer; None if it has none."""
        return next((table for table in self.tables if table.layer == layer), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV41Config(DeepseekSizes):
    """Of DeepSeek V4.1, without images.

    Raises:
        ModelFileError: the sizes do not fit together.
    """

    layers: tuple[V41Layer, ...]
    candidates_from: int
    """The layer whose scores choose the candidate blocks of all later choices."""
    candidate_blocks: int
    candidate_size: int
    """Entries of a candidate block."""
    engram: EngramConfig

    def __post_init__(self) -> None:
        DeepseekSizes.__post_init__(self)  # super() does not work in a class with slots
        for name in ("candidate_blocks", "candidate_size"):
            if getattr(self, name) < 1:
                raise ModelFileError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if not self.layers:
            raise ModelFileError("layers is empty: a model has at least one layer")
        chosen: int | None = None
        for index, layer in enumerate(self.layers):
            self._check_layer(index, layer)
            chosen = index if layer.chooses else chosen
            if layer.source is not None and (chosen is None or chosen < layer.source):
                raise ModelFileError(
                    f"layer {index} reads the entries of layer {layer.source}, but no layer from "
                    f"{layer.source} on has an index that chooses among them"
                )
        self._check_candidates()
        for table in self.engram.tables:
            if not 0 <= table.layer < len(self.layers):
                raise ModelFileError(
                    f"engram layer {table.layer} does not exist: there are {len(self.layers)}"
                )

    def _check_layer(self, index: int, layer: V41Layer) -> None:
        if layer.ratio not in (0, 1, 2):
            raise ModelFileError(
                f"the ratio of layer {index} is {layer.ratio}, only 0, 1 and 2 are"
            )
        if (layer.source is None) != (layer.ratio == 0):
            raise ModelFileError(
                f"layer {index} has ratio {layer.ratio} and reads entries of {layer.source}: a "
                "layer reads entries exactly if its ratio is not 0"
            )
        if layer.source is None:
            if layer.chooses:
                raise ModelFileError(f"layer {index} has an index, but no entries to choose from")
        elif self.layers[layer.source].ratio != layer.ratio:
            raise ModelFileError(
                f"layer {index} has ratio {layer.ratio}, but reads the entries of layer "
                f"{layer.source} with ratio {self.layers[layer.source].ratio}"
            )

    def _check_candidates(self) -> None:
        """Check that all that choose among candidates read the entries that these are."""
        first = self.candidates_from
        if not 0 <= first < len(self.layers) or not self.layers[first].chooses:
            raise ModelFileError(f"candidates come from layer {first}, which has no index")
        for index, layer in enumerate(self.layers[first:], start=first):
            if layer.chooses and layer.source != self.layers[first].source:
                raise ModelFileError(
                    f"layer {index} chooses among candidates of layer {first}, but reads entries "
                    f"of layer {layer.source}, not of {self.layers[first].source}"
                )
