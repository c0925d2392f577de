"""The indexer of DeepSeek-V3.2: a small attention whose scores choose the positions that a row of
the large one attends to.

Source: DeepSeek-AI 2025 (DeepSeek-V3.2), section 2.1. The published kernels turn queries and keys
by a Hadamard matrix and round them to 8 bits; the turn changes no score, and the rounding is left
out here.
"""

import torch
from torch import Tensor

from kernels.interface import Kernels, UnsupportedError
from kernels.latent import IndexQuery
from services.engine.compute.models.cache_tensors import write_rows
from services.engine.compute.models.rope import pair_halves
from services.engine.compute.models.weights import WeightReader
from services.engine.contract.model_config import IndexConfig, MlaConfig, ModelConfig

KEY_NORM_EPS = 1e-6


class Indexer:
    """Projections of index queries, keys and head weights of one layer."""

    def __init__(
        self,
        config: ModelConfig,
        mla: MlaConfig,
        index: IndexConfig,
        kernels: Kernels,
        reader: WeightReader,
        at: str,
    ) -> None:
        """Pack the weights of the indexer whose tensors begin with `at`.

        Rotated are the leading elements of a head, by halves: their rows are reordered so that
        rotated pairs are adjacent.

        Raises:
            ModelFileError: a tensor is missing or of the wrong shape.
            UnsupportedError: the kernel set has no latent attention.
        """
        if kernels.latent is None or mla.q_rank is None:
            raise UnsupportedError(f"kernels={kernels.name}: has no latent attention (MLA)")
        self._kernels, self._layer_norm = kernels, kernels.latent.layer_norm
        self._index, self._rope = index, mla.rope_dim
        hidden = config.hidden_size
        queries = reader(f"{at}.wq_b.weight", index.heads * index.dim, mla.q_rank)
        self._queries = kernels.pack(_paired(queries, index.heads, mla.rope_dim))
        keys = reader(f"{at}.wk.weight", index.dim, hidden)
        self._keys = kernels.pack(_paired(keys, 1, mla.rope_dim))
        self._norm, self._bias = (
            _paired(reader(f"{at}.k_norm.{part}", index.dim).view(-1, 1), 1, mla.rope_dim).view(-1)
            for part in ("weight", "bias")
        )
        weights = reader(f"{at}.weights_proj.weight", index.heads, hidden, dtype=torch.float32)
        self._weights = kernels.pack(weights)

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights, in bytes."""
        products = self._queries.nbytes + self._keys.nbytes + self._weights.nbytes
        return products + self._norm.nbytes + self._bias.nbytes

    def queries(
        self, normed: Tensor, q: Tensor, cos_sin: Tensor, slots: Tensor, cache: Tensor
    ) -> IndexQuery:
        """Index queries of all rows; their keys are written.

        Args:
            normed: [T, hidden] rows after the layer's norm.
            q: [T, q rank] normed latents of the queries.
            cos_sin: [T, rope dim / 2, 2].
            slots: [T] int64.
            cache: [blocks, block size, index size].
        """
        index = self._index
        keys = self._layer_norm(self._keys(normed), self._norm, self._bias, KEY_NORM_EPS)
        both = torch.cat((self._queries(q), keys), 1).view(len(q), index.heads + 1, index.dim)
        turned = both[..., : self._rope].contiguous()
        self._kernels.rope(turned, cos_sin)
        both[..., : self._rope] = turned
        write_rows(cache, both[:, index.heads], slots)
        weights = self._weights(normed.float()) * (index.heads**-0.5 * index.dim**-0.5)
        return IndexQuery(both[:, : index.heads], weights, cache, index.top_k)


def _paired(weight: Tensor, heads: int, rope: int) -> Tensor:
    """Reorder the first `rope` rows of each head of [heads * D, in]; see rope.pair_halves."""
    columns = weight.shape[1]
    each = weight.view(heads, -1, columns)
    turned = pair_halves(each[:, :rope].reshape(-1, columns), heads).view(heads, rope, columns)
    return torch.cat((turned, each[:, rope:]), 1).view(-1, columns)
