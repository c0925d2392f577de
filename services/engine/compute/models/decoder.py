"""The decoder that all served architectures share: embedding, layers, last norm and head.

It builds its layers from an architecture's declaration; see architecture.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.interface import Kernels
from services.engine.compute.models.architecture import Architecture, Latent, Mtp
from services.engine.compute.models.attention import Attention
from services.engine.compute.models.cache_tensors import CacheTensor, keys_and_values, latents
from services.engine.compute.models.input_metadata import InputMetadata
from services.engine.compute.models.latent_attention import LatentAttention
from services.engine.compute.models.mlp import Mlp
from services.engine.compute.models.moe import MoeBlock, RunExperts
from services.engine.compute.models.mtp import KeptMtp, MtpLayer, draft_names, total_bytes
from services.engine.compute.models.rope import cos_sin_table
from services.engine.compute.models.weights import EMBEDDING, WeightReader, head_weight
from services.engine.contract.model_config import ModelConfig


class FeedForward(Protocol):
    """The second half of a layer."""

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights that this process holds, in bytes."""

    def add_to(self, x: Tensor, normed: Tensor) -> None:
        """x [T, hidden] += output for the normed rows [T, hidden]."""


class Mixer(Protocol):
    """The first half of a layer: what mixes the positions of a sequence."""

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights, in bytes."""

    def add_to(
        self, x: Tensor, cos_sin: Tensor, data: InputMetadata, caches: Sequence[Tensor]
    ) -> None:
        """x [T, hidden] += attention of all rows; what the cache keeps of them is written.

        Args:
            cos_sin: [T, rotated pairs, 2].
            caches: the layer's tensors of the cache.
        """


@dataclass(frozen=True, slots=True)
class _Layer:
    attention: Mixer
    sliding: bool
    norm: Tensor
    feed_forward: FeedForward

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights in bytes, without the experts'."""
        return self.attention.nbytes + self.norm.nbytes + self.feed_forward.nbytes


class Decoder:
    """See registry.Model; its weights are packed for one kernel set, which it calls by layer."""

    def __init__(
        self,
        made_of: Architecture,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        kernels: Kernels,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int,
        experts: RunExperts | None = None,
        mtp: KeptMtp | None = None,
    ) -> None:
        """Pack the weights.

        Args:
            dtype: number format of activations, keys and values.
            max_positions: positions that a sequence may reach.
            experts: runs the experts of all layers; None for a dense model.
            mtp: the layers that draft tokens; None: those of the files are not read.

        Raises:
            ModelFileError: a tensor is missing, left over or of the wrong shape.
        """
        self.config = config
        self._made_of = made_of
        self._kernels = kernels
        self._experts = experts
        self._dtype = dtype
        reader = WeightReader(weights, dtype, device)
        self._embedding = reader.rows(EMBEDDING, config.vocab_size, config.hidden_size)
        self._layers = [self._pack_layer(reader, index) for index in range(config.num_layers)]
        self._norm = self._read_norm(reader, "model.norm")
        self._head = kernels.pack(head_weight(reader, config))
        self._cos_sin = cos_sin_table(config, max_positions).to(device)
        self._window_cos_sin = self._cos_sin
        if config.sliding_rope_theta is not None:
            self._window_cos_sin = cos_sin_table(config, max_positions, sliding=True).to(device)
        self._scale = config.hidden_size**0.5 if made_of.scales_embedding else None
        self.mtp: tuple[MtpLayer, ...] = ()
        self._draft_expert_bytes = mtp.expert_bytes if mtp else 0
        if made_of.mtp and mtp:
            self.mtp = tuple(self._pack_mtp(reader, n, made_of.mtp, mtp) for n in mtp.numbers)
        elif made_of.mtp:
            reader.ignore_drafts(draft_names(config, weights))
        reader.check_all_read()

    @property
    def nbytes(self) -> int:
        """See Model; a tied embedding counts once."""
        total = self._head.nbytes + self._norm.nbytes
        total += total_bytes(self._layers) + total_bytes(self.mtp) + self._draft_expert_bytes
        if not self.config.tie_embeddings or self._head.nbytes != self._embedding.nbytes:
            total += self._embedding.nbytes
        return total

    @property
    def cache_tensors(self) -> tuple[CacheTensor, ...]:
        """See Model."""
        if self.config.mla is not None:
            return latents(self.config, self.config.mla, self._dtype)
        return keys_and_values(self.config, self._dtype)

    def forward(self, data: InputMetadata, caches: Sequence[Tensor]) -> Tensor:
        """See Model."""
        x = self._embedding(data.token_ids)
        if self._scale is not None:
            # The factor is rounded to the number format first, as the models are trained.
            x = x * torch.tensor(self._scale, dtype=x.dtype)
        cos_sin = windowed = self._cos_sin.index_select(0, data.positions)
        if self._window_cos_sin is not self._cos_sin:
            windowed = self._window_cos_sin.index_select(0, data.positions)
        each = len(caches) // len(self._layers)
        for index, layer in enumerate(self._layers):
            own = caches[index * each : (index + 1) * each]
            layer.attention.add_to(x, windowed if layer.sliding else cos_sin, data, own)
            normed = self._kernels.rms_norm(x, layer.norm, self.config.rms_norm_eps)
            layer.feed_forward.add_to(x, normed)
        return x

    def cache(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See Model."""
        return self._cos_sin.new_zeros(shape, dtype=dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """See Model."""
        normed = self._kernels.rms_norm(hidden, self._norm, self.config.rms_norm_eps)
        return self._head(normed).float()

    def close(self) -> None:
        """See Model: it has no threads."""

    def _read_norm(self, reader: WeightReader, name: str) -> Tensor:
        return reader.norm(
            f"{name}.weight", self.config.hidden_size, offset=self._made_of.norm_offset
        )

    def _attention(self, reader: WeightReader, index: int, at: str) -> Mixer:
        made_of = self._made_of.attention
        if isinstance(made_of, Latent):
            return LatentAttention(self.config, self._kernels, reader, at, made_of)
        return Attention(
            self.config,
            self._kernels,
            reader,
            at,
            made_of,
            sliding=index in self.config.sliding_layers,
            norm_offset=self._made_of.norm_offset,
        )

    def _feed_forward(self, reader: WeightReader, index: int, at: str) -> FeedForward:
        config, made_of = self.config, self._made_of
        if config.moe is None or made_of.experts is None or index not in config.moe.layers:
            return self._dense(reader, at)
        if self._experts is None:
            raise ValueError("experts is None: a model with experts needs a RunExperts")
        return MoeBlock(config, self._kernels, reader, index, made_of.experts, self._experts)

    def _dense(self, reader: WeightReader, at: str) -> FeedForward:
        made_of = self._made_of
        return Mlp(
            self.config, self._kernels, reader, at, made_of.dense, norm_offset=made_of.norm_offset
        )

    def _pack_layer(self, reader: WeightReader, index: int) -> _Layer:
        at = f"model.layers.{index}"
        return self._join(reader, index, at, self._feed_forward(reader, index, at))

    def _join(self, reader: WeightReader, index: int, at: str, feed_forward: FeedForward) -> _Layer:
        return _Layer(
            attention=self._attention(reader, index, at),
            sliding=index in self.config.sliding_layers,
            norm=self._read_norm(reader, f"{at}.{self._made_of.dense.norm}"),
            feed_forward=feed_forward,
        )

    def _pack_mtp(self, reader: WeightReader, index: int, names: Mtp, kept: KeptMtp) -> MtpLayer:
        config, made_of, at = self.config, self._made_of, f"model.layers.{index}"
        hidden = config.hidden_size
        if made_of.experts is None or kept.experts is None:
            feed_forward = self._dense(reader, at)
        else:
            number = index - kept.numbers.start
            feed_forward = MoeBlock(
                config, self._kernels, reader, index, made_of.experts, kept.experts, number=number
            )
        reader.ignore(*(f"{at}.{name}.weight" for name in names.copies))
        project = reader(f"{at}.{names.project}.weight", hidden, 2 * hidden)
        return MtpLayer(
            embedding_norm=self._read_norm(reader, f"{at}.{names.embedding_norm}"),
            hidden_norm=self._read_norm(reader, f"{at}.{names.hidden_norm}"),
            project=self._kernels.pack(project),
            layer=self._join(reader, index, at, feed_forward),
            norm=self._read_norm(reader, f"{at}.{names.norm}"),
        )
