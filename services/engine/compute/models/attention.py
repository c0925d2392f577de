"""Grouped-query attention of one layer over paged keys and values.

Biases, norms per head and a sliding window are optional.
"""

import torch
from torch import Tensor

from kernels.interface import Kernels
from services.engine.compute.models.input_metadata import InputMetadata
from services.engine.compute.models.rope import pair_halves
from services.engine.compute.models.weights import WeightReader, add_bias
from services.engine.contract.model_config import ModelConfig


class Attention:
    """Norm, projections, rotary embedding, attention and output projection of one layer."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        reader: WeightReader,
        at: str,
        *,
        head_norms: bool,
        sliding: bool = False,
    ) -> None:
        """Pack the weights.

        Args:
            at: name prefix of the layer's tensors.
            head_norms: queries and keys are normed per head before they are rotated (Qwen3).
            sliding: rows attend to the model's window only.

        Raises:
            ModelFileError: a tensor is missing or of the wrong shape.
        """
        self._config = config
        self._kernels = kernels
        self._sliding = sliding
        hidden, dim = config.hidden_size, config.head_dim
        queries = config.num_heads * dim
        self._norm = reader(f"{at}.input_layernorm.weight", hidden)
        joined = joined_projection(config, reader, f"{at}.self_attn", "weight", hidden)
        self._qkv = kernels.pack(joined)
        self._qkv_bias: Tensor | None = None
        if config.qkv_bias:
            self._qkv_bias = joined_projection(config, reader, f"{at}.self_attn", "bias", 1).view(
                -1
            )
        output = reader(f"{at}.self_attn.o_proj.weight", hidden, queries)
        self._output = kernels.row_parallel(kernels.pack(output))
        self._output_bias = reader.optional(
            f"{at}.self_attn.o_proj.bias", hidden, wanted=config.output_bias
        )
        self._head_norms: tuple[Tensor, ...] = ()
        if head_norms:
            names = (f"{at}.self_attn.q_norm.weight", f"{at}.self_attn.k_norm.weight")
            self._head_norms = tuple(paired_norm(reader, name, dim) for name in names)

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights, in bytes."""
        biases = (b for b in (self._qkv_bias, self._output_bias) if b is not None)
        rows = sum(row.nbytes for row in (self._norm, *self._head_norms, *biases))
        return rows + self._qkv.nbytes + self._output.nbytes

    def add_to(self, x: Tensor, cos_sin: Tensor, data: InputMetadata, cache: Tensor) -> None:
        """x [T, hidden] += attention of all rows; their keys and values are written.

        Args:
            cos_sin: [T, D / 2, 2].
            cache: [blocks, block size, 2 G, D].
        """
        config, kernels = self._config, self._kernels
        normed = kernels.rms_norm(x, self._norm, config.rms_norm_eps)
        qkv = add_bias(self._qkv(normed), self._qkv_bias).view(x.shape[0], -1, config.head_dim)
        if self._head_norms:
            self._norm_heads(qkv)
        kernels.rope(qkv[:, : config.num_heads + config.num_kv_heads], cos_sin)
        q, kv = qkv[:, : config.num_heads], qkv[:, config.num_heads :]
        kernels.kv_write(cache, kv, data.slots)
        groups = data.window_groups if self._sliding else data.groups
        parts = [kernels.attention(q[g.rows], kv[g.rows], cache, g) for g in groups]
        self._output.add_to(x, parts[0] if len(parts) == 1 else torch.cat(parts))
        add_bias(x, self._output_bias)

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


def joined_projection(
    config: ModelConfig, reader: WeightReader, at: str, part: str, columns: int
) -> Tensor:
    """Query, key and value projections as one: [(H + 2 G) * D, columns].

    Rows of queries and keys are reordered so that rotated pairs are adjacent.

    Args:
        part: "weight", or "bias" with one column.

    Raises:
        ModelFileError: a tensor is missing or of the wrong shape.
    """
    heads = (("q", config.num_heads), ("k", config.num_kv_heads), ("v", config.num_kv_heads))
    rows = []
    for name, count in heads:
        shape = (count * config.head_dim,) + ((columns,) if part == "weight" else ())
        tensor = reader(f"{at}.{name}_proj.{part}", *shape).view(-1, columns)
        rows.append(tensor if name == "v" else pair_halves(tensor, count))
    return torch.cat(rows)


def paired_norm(reader: WeightReader, name: str, dim: int) -> Tensor:
    """A norm of heads [D], reordered like the rows of their projection."""
    return pair_halves(reader(name, dim).view(dim, 1), 1).view(dim)
