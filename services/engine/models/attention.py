"""Grouped-query attention of one layer over paged keys and values, with or without head norms."""

import torch
from torch import Tensor

from kernels.dispatch import Kernels
from services.engine.input_metadata import InputMetadata
from services.engine.models.config import ModelConfig
from services.engine.models.rope import pair_halves
from services.engine.models.weights import Taker


class Attention:
    """Norm, projections, rotation, attention and output of one layer."""

    def __init__(
        self, config: ModelConfig, kernels: Kernels, take: Taker, at: str, *, head_norms: bool
    ) -> None:
        """Pack the weights.

        Args:
            at: prefix of the layer's tensors.
            head_norms: queries and keys are normed per head before they are rotated (Qwen3).

        Raises:
            ModelFileError: a tensor is missing or of the wrong shape.
        """
        self._config = config
        self._kernels = kernels
        hidden, dim = config.hidden_size, config.head_dim
        queries, keys = config.num_heads * dim, config.num_kv_heads * dim
        q = take(f"{at}.self_attn.q_proj.weight", queries, hidden)
        k = take(f"{at}.self_attn.k_proj.weight", keys, hidden)
        v = take(f"{at}.self_attn.v_proj.weight", keys, hidden)
        paired = (pair_halves(q, config.num_heads), pair_halves(k, config.num_kv_heads))
        self._norm = take(f"{at}.input_layernorm.weight", hidden)
        self._qkv = kernels.pack(torch.cat((*paired, v)))
        self._output = kernels.pack(take(f"{at}.self_attn.o_proj.weight", hidden, queries))
        self._head_norms: tuple[Tensor, ...] = ()
        if head_norms:
            names = (f"{at}.self_attn.q_norm.weight", f"{at}.self_attn.k_norm.weight")
            # A row of one column: the order of a head's elements follows that of its projection.
            self._head_norms = tuple(
                pair_halves(take(name, dim).view(dim, 1), 1).view(dim) for name in names
            )

    @property
    def nbytes(self) -> int:
        """Memory of the weights as packed."""
        norms = sum(norm.nbytes for norm in (self._norm, *self._head_norms))
        return norms + self._qkv.nbytes + self._output.nbytes

    def add_to(self, x: Tensor, turns: Tensor, data: InputMetadata, cache: Tensor) -> None:
        """x [T, hidden] += attention of all rows, whose keys and values are written."""
        config, kernels = self._config, self._kernels
        normed = kernels.rms_norm(x, self._norm, config.rms_norm_eps)
        qkv = self._qkv(normed).view(x.shape[0], -1, config.head_dim)
        if self._head_norms:
            self._norm_heads(qkv)
        kernels.rope(qkv[:, : config.num_heads + config.num_kv_heads], turns)
        q, kv = qkv[:, : config.num_heads], qkv[:, config.num_heads :]
        kernels.kv_write(cache, kv, data.slots)
        parts = [kernels.attention(q[g.rows], kv[g.rows], cache, g) for g in data.groups]
        self._output.add_to(x, parts[0] if len(parts) == 1 else torch.cat(parts))

    def _norm_heads(self, qkv: Tensor) -> None:
        config = self._config
        first = 0
        counts = (config.num_heads, config.num_kv_heads)
        for count, weight in zip(counts, self._head_norms, strict=True):
            heads = qkv[:, first : first + count]
            rows = heads.reshape(-1, config.head_dim)
            normed = self._kernels.rms_norm(rows, weight, config.rms_norm_eps)
            heads.copy_(normed.view(heads.shape))
            first += count
