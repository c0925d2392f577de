"""The interface of a kernel set that runs all layers of a round as one job.

A model hands over its packed weights once and gets a `RoundProgram`. Letters in shapes are those of
`kernels.interface`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RoutedShape:
    """Sizes of the layers that have experts; they are equal in all of them."""

    experts: int
    top_k: int
    """Experts per row."""
    intermediate: int
    """Rows of an expert's gate, and of its up projection."""
    renormalise: bool
    """The weights of a row's experts are divided by their sum."""
    layers: int
    """Layers that have experts."""


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes of a decoder, in elements."""

    hidden: int
    heads: int
    """Query heads."""
    kv_heads: int
    dim: int
    """Size of a head."""
    intermediate: int
    """Rows of the gate, and of the up projection, of a dense layer."""
    vocabulary: int
    eps: float
    """Added to the mean square in every RMS norm."""
    block: int
    """Positions of a KV-cache block."""
    routed: RoutedShape | None = None
    """None for a dense decoder."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [out, in] as panels of adjacent outputs; missing outputs are zeros."""

    panels: Tensor
    """[panels, in, panel width] float32; or [panels, ceil(in / 2), panel width, 2] bfloat16; or
    [panels, ceil(in / 4), panel width, 4] uint8: int8 values plus 128."""
    scales: Tensor | None
    """int8 only: [panels * panel width] float32, one scale per output."""

    @property
    def nbytes(self) -> int:
        """Memory of the panels and scales, in bytes."""
        return self.panels.nbytes + (0 if self.scales is None else self.scales.nbytes)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer. Query, key and value are one projection, and so are gate and up."""

    norm: Tensor
    """[hidden]: the norm before attention."""
    qkv: PackedWeight
    qkv_bias: Tensor | None
    """[(H + 2 G) * D]."""
    output: PackedWeight
    output_bias: Tensor | None
    """[hidden]."""
    norm_2: Tensor
    """[hidden]: the norm before the feed-forward."""
    gate_up: PackedWeight
    """With a router, this and `down` hold the weights of all experts, as `pack_experts` made them;
    they have no bias."""
    gate_up_bias: Tensor | None
    """[2 * intermediate]."""
    down: PackedWeight
    down_bias: Tensor | None
    """[hidden]."""
    q_norm: Tensor | None
    """[D]: norm of each query head; None if the model has none."""
    k_norm: Tensor | None
    """[D]: norm of each key head; None if the model has none."""
    window: int
    """Sliding window in positions; 0 for full attention."""
    router: PackedWeight | None = None
    """[experts, hidden] in float32; None for a dense layer."""


@dataclass(frozen=True, slots=True)
class Spans:
    """Which rows of a round belong to which sequence."""

    seqs: Tensor
    """[sequences, 3] int64: first row, number of rows, positions computed in earlier rounds."""
    tables: Tensor
    """[sequences, blocks] int64: block tables, padded with block 0."""


class RoundProgram(Protocol):
    """A decoder as one job. It owns buffers and threads and runs one round at a time."""

    def forward(
        self, x: Tensor, cos_sin: Tensor, slots: Tensor, spans: Spans, caches: Sequence[Tensor]
    ) -> Tensor:
        """Run all layers and store the rows' keys and values.

        Args:
            x: [T, hidden] float32 embeddings.
            cos_sin: [T, D / 2, 2] float32 cosines and sines.
            slots: [T] int64: block * block size + offset.
            caches: per layer, blocks * block size * 2 G * D values in one number format; the layout
                is the program's.

        Returns:
            [T, hidden] before the last norm; valid until the next call.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Last norm and head of rows that `forward` returned: [rows, vocabulary] float32."""

    def expert_rows(self) -> Tensor | None:
        """Rows of each expert in the last `forward`: [layers with experts, experts] int64.

        Valid until the next call; None for a dense decoder.
        """

    def close(self) -> None:
        """End the helper threads; idempotent. Later calls run on one thread."""


class WholeRounds(Protocol):
    """Packs the weights of one model and makes its program."""

    cache_dtype: torch.dtype
    """Number format of keys and values."""

    def pack(self, weight: Tensor) -> PackedWeight:
        """Pack a weight [out, in]."""

    def pack_router(self, weight: Tensor) -> PackedWeight:
        """Pack a router [experts, hidden], in float32: rounding it would change choices."""

    def pack_experts(self, count: int, read: Callable[[int], Tensor]) -> PackedWeight:
        """Pack a weight [out, in] of each expert, one after another, each in whole panels.

        Args:
            count: number of experts.
            read: the weight of one expert; called once for each, in order.
        """

    def cache(self, shape: tuple[int, ...]) -> Tensor:
        """Zeros for one layer's keys and values, in `cache_dtype`."""

    def program(
        self,
        shape: DecoderShape,
        layers: Sequence[LayerWeights],
        norm: Tensor,
        head: PackedWeight,
        threads: int,
    ) -> RoundProgram:
        """Make the program.

        Args:
            norm: [hidden]: the last norm.
            head: the packed head [vocabulary, hidden].
            threads: threads of a job, the caller's included.
        """
