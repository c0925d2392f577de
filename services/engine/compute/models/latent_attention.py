"""Multi-head latent attention (MLA) of one layer, and the indexer that may choose its positions.

The cache keeps one vector per position for all heads: the normed latent and the rotated part of the
key. Queries are projected into the latent's space and results out of it ("absorbed"), in prefill
and decode alike, so that a row's result does not depend on which of the two computes it.

Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1 and appendix C.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.interface import Kernels, UnsupportedError
from kernels.latent import IndexQuery
from services.engine.compute.models.architecture import Latent
from services.engine.compute.models.cache_tensors import write_rows
from services.engine.compute.models.indexer import Indexer
from services.engine.compute.models.input_metadata import InputMetadata
from services.engine.compute.models.weights import WeightReader
from services.engine.contract.model_config import ModelConfig

NORM_EPS = 1e-6
"""Of the norms of latents; the published models fix it apart from `rms_norm_eps`."""


class LatentAttention:
    """Norm, projections, rotary embedding, attention and output projection of one layer."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        reader: WeightReader,
        at: str,
        made_of: Latent,
    ) -> None:
        """Pack the weights of the layer whose tensors begin with `at`.

        Raises:
            ModelFileError: a tensor is missing or of the wrong shape.
            UnsupportedError: the kernel set has no latent attention.
        """
        mla = config.mla
        if kernels.latent is None:
            raise UnsupportedError(f"kernels={kernels.name}: has no latent attention (MLA)")
        if mla is None:
            raise ValueError("mla is None: the configuration has no sizes of latent attention")
        self._config, self._mla = config, mla
        self._kernels, self._latent = kernels, kernels.latent
        own, hidden, heads = f"{at}.{made_of.part}", config.hidden_size, config.num_heads
        self._norm = reader(f"{at}.{made_of.norm}.weight", hidden)
        query_size = heads * (mla.nope_dim + mla.rope_dim)
        self._q_norm: Tensor | None = None
        down = [reader(f"{own}.kv_a_proj_with_mqa.weight", mla.kv_rank + mla.rope_dim, hidden)]
        if mla.q_rank is None:
            down.append(reader(f"{own}.q_proj.weight", query_size, hidden))
        else:
            down.append(reader(f"{own}.q_a_proj.weight", mla.q_rank, hidden))
            self._q_norm = reader(f"{own}.q_a_layernorm.weight", mla.q_rank)
            self._q_up = kernels.pack(reader(f"{own}.q_b_proj.weight", query_size, mla.q_rank))
        self._down = kernels.pack(torch.cat(down))
        self._kv_norm = reader(f"{own}.kv_a_layernorm.weight", mla.kv_rank)
        kv_up = reader(
            f"{own}.kv_b_proj.weight", heads * (mla.nope_dim + mla.value_dim), mla.kv_rank
        )
        keys, values = kv_up.view(heads, -1, mla.kv_rank).split_with_sizes(
            (mla.nope_dim, mla.value_dim), 1
        )
        self._absorb = self._latent.pack_heads(keys.transpose(1, 2).contiguous())
        self._expand = self._latent.pack_heads(values.contiguous())
        output = reader(f"{own}.o_proj.weight", hidden, heads * mla.value_dim)
        self._output = kernels.row_parallel(kernels.pack(output))
        self._indexer: Indexer | None = None
        if mla.index is not None:
            self._indexer = Indexer(config, mla, mla.index, kernels, reader, f"{own}.indexer")

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights, in bytes."""
        total = self._norm.nbytes + self._kv_norm.nbytes + self._down.nbytes + self._output.nbytes
        total += self._absorb.nbytes + self._expand.nbytes
        if self._q_norm is not None:
            total += self._q_norm.nbytes + self._q_up.nbytes
        return total + (self._indexer.nbytes if self._indexer else 0)

    def add_to(
        self, x: Tensor, cos_sin: Tensor, data: InputMetadata, caches: Sequence[Tensor]
    ) -> None:
        """x [T, hidden] += attention of all rows; their latents and index keys are written.

        Args:
            cos_sin: [T, rope dim / 2, 2].
            caches: latents [blocks, block size, kv rank + rope dim], and with an indexer its keys
                [blocks, block size, index size].
        """
        latents = caches[0]
        mla, kernels = self._mla, self._kernels
        normed = kernels.rms_norm(x, self._norm, self._config.rms_norm_eps)
        latent, rope, q = self._down(normed).split_with_sizes(
            (mla.kv_rank, mla.rope_dim, self._q_size), 1
        )
        if self._q_norm is not None:
            q = kernels.rms_norm(q.contiguous(), self._q_norm, NORM_EPS)
        index = None
        if self._indexer is not None:
            index = self._indexer.queries(normed, q, cos_sin, data.slots, caches[1])
        queries = self._q_up(q) if self._q_norm is not None else q
        own, rotated = self._rotate(queries, rope, cos_sin)
        row = torch.cat(
            (kernels.rms_norm(latent.contiguous(), self._kv_norm, NORM_EPS), rotated), 1
        )
        write_rows(latents, row, data.slots)
        mixed = self._attend(own, latents, data, index)
        self._output.add_to(x, self._expand(mixed).reshape(len(x), -1))

    @property
    def _q_size(self) -> int:
        mla = self._mla
        return mla.q_rank or self._config.num_heads * (mla.nope_dim + mla.rope_dim)

    def _rotate(self, queries: Tensor, rope: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [T, H, kv rank + rope dim] in the latent's space, and rotated keys [T, rope]."""
        mla, heads = self._mla, self._config.num_heads
        nope, turned = queries.view(len(queries), heads, -1).split_with_sizes(
            (mla.nope_dim, mla.rope_dim), 2
        )
        both = torch.cat((turned, rope.unsqueeze(1)), 1)
        self._kernels.rope(both, cos_sin)
        return torch.cat((self._absorb(nope), both[:, :heads]), 2), both[:, heads]

    def _attend(
        self, q: Tensor, latents: Tensor, data: InputMetadata, index: IndexQuery | None
    ) -> Tensor:
        """Mixed latents [T, H, kv rank]."""
        mla = self._mla
        if data.ragged is not None and self._latent.ragged is not None:
            return self._latent.ragged(
                q, latents, data.ragged, rank=mla.kv_rank, scale=mla.scale, index=index
            )
        parts = [
            self._latent.attention(
                q[group.rows],
                latents,
                group,
                mla.kv_rank,
                mla.scale,
                None if index is None else index.of_rows(group.rows),
            )
            for group in data.groups
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
