"""Grouped-query attention of one layer over paged keys and values, as declared."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.interface import AttentionGroup, Kernels
from services.engine.compute.models.architecture import GroupedQuery
from services.engine.compute.models.input_metadata import InputMetadata
from services.engine.compute.models.rope import pair_halves
from services.engine.compute.models.weights import WeightReader, add_bias
from services.engine.contract.model_config import ModelConfig

_SEPARATE = ("q_proj", "k_proj", "v_proj")


class Attention:
    """Norm, projections, rotary embedding, attention and output projection of one layer."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        reader: WeightReader,
        at: str,
        made_of: GroupedQuery,
        *,
        sliding: bool = False,
        norm_offset: float = 0.0,
    ) -> None:
        """Pack the weights.

        Args:
            at: name prefix of the layer's tensors.
            sliding: rows attend to the model's window only.
            norm_offset: see Architecture.

        Raises:
            ModelFileError: a tensor is missing or of the wrong shape.
        """
        self._config = config
        self._kernels = kernels
        self._sliding = sliding
        hidden = config.hidden_size

        def norm(name: str, size: int = hidden) -> Tensor:
            return reader.norm(f"{at}.{name}.weight", size, offset=norm_offset)

        self._norm = norm(made_of.norm)
        self._head_norms: tuple[Tensor, ...] = ()
        if config.head_norms:
            self._head_norms = tuple(
                _paired(norm(name, config.head_dim), config) for name in made_of.head_norms
            )
        names = made_of.projections
        joined = joined_projection(config, reader, at, "weight", hidden, names)
        self._qkv_bias: Tensor | None = None
        if config.qkv_bias:
            self._qkv_bias = joined_projection(config, reader, at, "bias", 1, names).view(-1)
        self._scale_queries(joined)
        self._qkv = kernels.pack(joined)
        queries = config.num_heads * config.head_dim
        output = reader(f"{at}.{made_of.output}.weight", hidden, queries)
        self._output = kernels.row_parallel(kernels.pack(output))
        self._output_bias = reader.optional(
            f"{at}.{made_of.output}.bias", hidden, wanted=config.output_bias
        )
        self._post_norm = norm(made_of.post_norm) if made_of.post_norm else None
        self._sinks = reader(f"{at}.{made_of.sinks}", config.num_heads) if made_of.sinks else None

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights, in bytes."""
        optional = (self._qkv_bias, self._output_bias, self._post_norm, self._sinks)
        rows = (self._norm, *self._head_norms, *(row for row in optional if row is not None))
        return sum(row.nbytes for row in rows) + self._qkv.nbytes + self._output.nbytes

    def add_to(
        self, x: Tensor, cos_sin: Tensor, data: InputMetadata, caches: Sequence[Tensor]
    ) -> None:
        """x [T, hidden] += attention of all rows; their keys and values are written.

        Args:
            cos_sin: [T, D / 2, 2].
            caches: one, [blocks, block size, 2 G, D].
        """
        (cache,) = caches
        config, kernels = self._config, self._kernels
        normed = kernels.rms_norm(x, self._norm, config.rms_norm_eps)
        qkv = add_bias(self._qkv(normed), self._qkv_bias).view(x.shape[0], -1, config.head_dim)
        self._place_heads(qkv, cos_sin, cache, data.slots)
        q, kv = qkv[:, : config.num_heads], qkv[:, config.num_heads :]
        if data.ragged is not None and kernels.ragged is not None:
            window = config.sliding_window if self._sliding else 0
            mixed = kernels.ragged(
                q, cache, data.ragged, scale=None, window=window, sinks=self._sinks
            )
        else:
            groups = data.window_groups if self._sliding else data.groups
            parts = [self._attend(q[g.rows], kv[g.rows], cache, g) for g in groups]
            mixed = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self._post_norm is None:
            self._output.add_to(x, mixed)
            add_bias(x, self._output_bias)
            return
        out = add_bias(self._output(mixed), self._output_bias)
        x.add_(kernels.rms_norm(out, self._post_norm, config.rms_norm_eps))

    def _attend(self, q: Tensor, kv: Tensor, cache: Tensor, group: AttentionGroup) -> Tensor:
        if self._sinks is None:
            return self._kernels.attention(q, kv, cache, group)
        return self._kernels.sink_attention(q, kv, cache, group, self._sinks)

    def _scale_queries(self, joined: Tensor) -> None:
        """Multiply queries by what `query_scale` differs by from what kernels use, 1 / sqrt(D)."""
        config = self._config
        if config.query_scale is None:
            return
        factor = config.query_scale * config.head_dim**0.5
        if factor == 1:
            return
        if self._head_norms:  # a norm would undo a factor before it
            self._head_norms = (self._head_norms[0] * factor, *self._head_norms[1:])
            return
        rows = config.num_heads * config.head_dim
        for part in (joined, self._qkv_bias):
            if part is not None:
                part[:rows].mul_(factor)

    def _place_heads(self, qkv: Tensor, cos_sin: Tensor, cache: Tensor, slots: Tensor) -> None:
        """Norm and rotate queries and keys in place, and write keys and values to the cache."""
        config, kernels = self._config, self._kernels
        if kernels.place_heads is not None:
            own = self._head_norms
            norms = (own[0], own[1]) if own else None
            kernels.place_heads(qkv, norms, config.rms_norm_eps, cos_sin, cache, slots)
            return
        if self._head_norms:
            self._norm_heads(qkv)
        kernels.rope(qkv[:, : config.num_heads + config.num_kv_heads], cos_sin)
        kernels.kv_write(cache, qkv[:, config.num_heads :], slots)

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
    config: ModelConfig,
    reader: WeightReader,
    at: str,
    part: str,
    columns: int,
    names: tuple[str, ...] = _SEPARATE,
) -> Tensor:
    """Query, key and value projections as one: [(H + 2 G) * D, columns].

    Rows of queries and keys are reordered so that rotated pairs are adjacent.

    Args:
        part: "weight", or "bias" with one column.
        names: of the three tensors below `at`, or of one with the rows of all three.

    Raises:
        ModelFileError: a tensor is missing or of the wrong shape.
    """
    counts = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    sizes = [count * config.head_dim for count in counts]

    def read(name: str, rows: int) -> Tensor:
        shape = (rows, columns) if part == "weight" else (rows,)
        return reader(f"{at}.{name}.{part}", *shape).view(-1, columns)

    if len(names) == 1:
        parts = list(torch.split(read(names[0], sum(sizes)), sizes))
    else:
        parts = [read(name, rows) for name, rows in zip(names, sizes, strict=True)]
    rotated = [
        pair_halves(rows, count, config.rotary_dim)
        for rows, count in zip(parts[:2], counts, strict=False)
    ]
    return torch.cat((*rotated, parts[2]))


def paired_norm(reader: WeightReader, name: str, dim: int) -> Tensor:
    """A norm of heads [D] whose every pair is rotated, reordered like its projection's rows."""
    return pair_halves(reader(name, dim).view(dim, 1), 1).view(dim)


def _paired(norm: Tensor, config: ModelConfig) -> Tensor:
    return pair_halves(norm.view(-1, 1), 1, config.rotary_dim).view(-1)
