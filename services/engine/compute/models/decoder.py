"""What the served architectures share: embedding, layers, last norm and head.

What the configuration does not say of its layers, an architecture does (llama.py, qwen3.py,
qwen3_moe.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.interface import Kernels
from services.engine.compute.models.attention import Attention
from services.engine.compute.models.input_metadata import InputMetadata
from services.engine.compute.models.mlp import Mlp
from services.engine.compute.models.moe import RunExperts
from services.engine.compute.models.rope import turn_table
from services.engine.compute.models.weights import Taker
from services.engine.contract.model_config import ModelConfig

_EMBEDDING = "model.embed_tokens.weight"


class FeedForward(Protocol):
    """The second half of a layer."""

    @property
    def nbytes(self) -> int:
        """Memory of the weights that this process holds as part of it."""

    def add_to(self, x: Tensor, normed: Tensor) -> None:
        """x [T, hidden] += its output for the normed rows."""


@dataclass(frozen=True, slots=True)
class _Layer:
    attention: Attention
    norm: Tensor
    feed_forward: FeedForward


class Decoder:
    """Weights packed for one set of kernels; holds no state of any request."""

    head_norms = False
    """Queries and keys pass a norm per head before they are rotated."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int,
        experts: RunExperts | None = None,
    ) -> None:
        """Pack the weights.

        Args:
            dtype: of activations, keys and values.
            max_positions: positions that a sequence may reach.
            experts: runs the experts of all layers; for a model that has some.

        Raises:
            ModelFileError: a tensor is missing, left over or of the wrong shape.
        """
        self.config = config
        self._kernels = kernels
        self._experts = experts
        self._dtype = dtype
        take = Taker(weights, dtype, device)
        self._embedding = take.rows(_EMBEDDING, config.vocab_size, config.hidden_size)
        self._layers = [self._pack_layer(take, index) for index in range(config.num_layers)]
        self._norm = take("model.norm.weight", config.hidden_size)
        self._head = kernels.pack(self._head_weight(take))
        self._turns = turn_table(config, max_positions).to(device)
        take.finish()

    @property
    def nbytes(self) -> int:
        """Memory of the weights as packed, without experts; a tied embedding counts once."""
        total = self._head.nbytes + self._norm.nbytes
        if not self.config.tie_embeddings or self._head.nbytes != self._embedding.nbytes:
            total += self._embedding.nbytes
        for layer in self._layers:
            total += layer.attention.nbytes + layer.norm.nbytes + layer.feed_forward.nbytes
        return total

    def forward(self, data: InputMetadata, caches: Sequence[Tensor]) -> Tensor:
        """Compute all rows of a round, writing their keys and values.

        Args:
            caches: per layer, [blocks, block, 2 G, D].

        Returns:
            [T, hidden], before the last norm.
        """
        x = self._embedding(data.token_ids)
        turns = self._turns.index_select(0, data.positions)
        for layer, cache in zip(self._layers, caches, strict=True):
            layer.attention.add_to(x, turns, data, cache)
            normed = self._kernels.rms_norm(x, layer.norm, self.config.rms_norm_eps)
            layer.feed_forward.add_to(x, normed)
        return x

    def cache(self, shape: tuple[int, ...]) -> Tensor:
        """Zeros for one layer's keys and values."""
        return self._turns.new_zeros(shape, dtype=self._dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocabulary] in float32, of rows that `forward` gave."""
        normed = self._kernels.rms_norm(hidden, self._norm, self.config.rms_norm_eps)
        return self._head(normed).float()

    def _attention(self, take: Taker, index: int, at: str) -> Attention:
        return Attention(
            self.config,
            self._kernels,
            take,
            at,
            head_norms=self.head_norms,
            sliding=index in self.config.sliding_layers,
        )

    def _feed_forward(self, take: Taker, index: int, at: str) -> FeedForward:
        return Mlp(self.config, self._kernels, take, at)

    def _pack_layer(self, take: Taker, index: int) -> _Layer:
        at = f"model.layers.{index}"
        return _Layer(
            attention=self._attention(take, index, at),
            norm=take(f"{at}.post_attention_layernorm.weight", self.config.hidden_size),
            feed_forward=self._feed_forward(take, index, at),
        )

    def _head_weight(self, take: Taker) -> Tensor:
        if self.config.tie_embeddings:
            take.ignore("lm_head.weight")
            return take(_EMBEDDING, self.config.vocab_size, self.config.hidden_size)
        return take("lm_head.weight", self.config.vocab_size, self.config.hidden_size)
