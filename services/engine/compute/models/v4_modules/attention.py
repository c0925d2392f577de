"""Attention of one layer: over the latest positions, and over compressed entries where it has them.

All heads share one vector per position, which is key and value. The vector is rotated, so a value
carries the rotation of its position; the output is rotated back by the row's own position, which
leaves the distance. A learned score per head (the sink) takes part in the softmax without a value.
"""

import torch
from torch import Tensor

from kernels.interface import Kernels
from services.engine.compute.models.v4_modules.compressor import Compressor
from services.engine.compute.models.v4_modules.fixed_order import by_vectors
from services.engine.compute.models.v4_modules.indexer import Indexer, visible_tables
from services.engine.compute.models.v4_modules.memory import LayerMemory
from services.engine.compute.models.v4_modules.rotary import rotate
from services.engine.compute.models.v4_modules.round_plan import EntryPlan, RoundPlan
from services.engine.compute.models.weights import WeightReader
from services.engine.contract.deepseek_v4 import DeepseekV4Config, V4Layer

GATHERED = 1 << 22
"""Elements of keys that one call of `_attend` gathers, at most: it bounds memory."""


class V4Attention:
    """Projections, compressors, indexer, attention and grouped output projection of one layer."""

    def __init__(
        self,
        config: DeepseekV4Config,
        kernels: Kernels,
        reader: WeightReader,
        at: str,
        layer: V4Layer,
    ) -> None:
        """Pack the weights of the layer whose tensors begin with `at`.

        Raises:
            ModelFileError: a tensor is missing or of the wrong shape.
        """
        hidden, dim, rank = config.hidden_size, config.head_dim, config.query_rank
        self._config, self._kernels, self._layer = config, kernels, layer
        joined = (
            reader(f"{at}.wq_a.weight", rank, hidden),
            reader(f"{at}.wkv.weight", dim, hidden),
        )
        self._low = kernels.pack(torch.cat(joined))
        self._query_norm = reader(f"{at}.q_norm.weight", rank)
        self._key_norm = reader(f"{at}.kv_norm.weight", dim)
        self._head_norm = torch.ones_like(self._key_norm)
        heads = config.num_heads * dim
        self._query = kernels.pack(reader(f"{at}.wq_b.weight", heads, rank))
        self._sink = reader(f"{at}.attn_sink", config.num_heads).view(-1, 1)
        groups, wide = config.output_groups, config.output_rank
        first = reader(f"{at}.wo_a.weight", groups * wide, heads // groups)
        self._out_groups = [kernels.pack(part) for part in torch.split(first, wide)]
        self._out = kernels.pack(reader(f"{at}.wo_b.weight", hidden, groups * wide))
        self._main: Compressor | None = None
        self._indexer: Indexer | None = None
        if layer.ratio:
            self._main = Compressor(config, kernels, reader, f"{at}.compressor", layer, dim)
        if layer.kind == "indexed":
            self._indexer = Indexer(config, kernels, reader, f"{at}.indexer", layer)
        # With one row per call, the shapes of a row's products depend on its position only.
        self._one_by_one = kernels.name == "torch-tiled"

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights, in bytes."""
        parts = (self._main, self._indexer, self._low, self._query, self._out, *self._out_groups)
        rows = (self._query_norm, self._key_norm, self._head_norm, self._sink)
        return sum(part.nbytes for part in (*parts, *rows) if part is not None)

    def __call__(self, x: Tensor, cos_sin: Tensor, plan: RoundPlan, memory: LayerMemory) -> Tensor:
        """The layer's output [T, hidden] for the normed rows x [T, hidden].

        Keys, entries and rows of compressors are written to the memory.

        Args:
            cos_sin: [positions, rope_dim / 2, 2], of all positions.
        """
        config, kernels = self._config, self._kernels
        turned = cos_sin[plan.positions]
        low = self._low(x)
        low_rank = self._norm(low[:, : config.query_rank], self._query_norm)
        keys = self._norm(low[:, config.query_rank :], self._key_norm)
        rotate(keys, turned)
        queries = self._query(low_rank).view(-1, config.head_dim)
        queries = kernels.rms_norm(queries, self._head_norm, config.rms_norm_eps)
        queries = queries.view(len(x), config.num_heads, config.head_dim)
        rotate(queries, turned)
        latest = plan.ring.join(memory.window, keys)
        plan.ring.keep(memory.window, keys)
        index = self._write_entries(x, low_rank, cos_sin, plan, memory)
        mixed = self._mix(queries, latest, index, plan, memory)
        rotate(mixed, turned, back=True)
        return self._project_out(mixed)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._kernels.rms_norm(x.contiguous(), weight, self._config.rms_norm_eps)

    def _write_entries(
        self, x: Tensor, low_rank: Tensor, cos_sin: Tensor, plan: RoundPlan, memory: LayerMemory
    ) -> tuple[Tensor, Tensor] | None:
        """Write what the round completes; index queries and head weights of an indexed layer."""
        if self._main is None or memory.main is None:
            return None
        entries = plan.entries[self._layer.ratio]
        self._main.write_entries(x, cos_sin, entries, memory.main)
        if self._indexer is None or memory.index is None:
            return None
        self._indexer.compressor.write_entries(x, cos_sin, entries, memory.index)
        return self._indexer.queries(x, low_rank, cos_sin[plan.positions])

    def _mix(
        self,
        queries: Tensor,
        latest: Tensor,
        index: tuple[Tensor, Tensor] | None,
        plan: RoundPlan,
        memory: LayerMemory,
    ) -> Tensor:
        """Attention's output [T, heads, D], still rotated."""
        entries = plan.entries.get(self._layer.ratio)
        mixed = torch.empty_like(queries)
        for part in self._parts(plan, entries):
            rows = torch.arange(part.start, part.stop)
            first = self._config.window - max(plan.seen[part])
            keys = [latest[plan.window[rows, first:]]]
            shown = [_shown(plan.seen[part], keys[0].shape[1], from_end=True)]
            if entries and memory.main and max(entries.visible[part]):
                slots, numbers = self._choose(rows, part, index, entries, plan, memory)
                keys.append(memory.main.entries.flatten(0, 1)[slots].to(queries.dtype))
                shown.append(_shown(numbers, slots.shape[1], from_end=False))
            own = queries.index_select(0, rows)
            mixed[part] = _attend(own, torch.cat(keys, 1), torch.cat(shown, 1), self._sink)
        return mixed

    def _choose(
        self,
        rows: Tensor,
        part: slice,
        index: tuple[Tensor, Tensor] | None,
        entries: EntryPlan,
        plan: RoundPlan,
        memory: LayerMemory,
    ) -> tuple[Tensor, tuple[int, ...]]:
        """Slots of the entries that some rows attend to, and the number per row."""
        visible = entries.visible[part]
        tables = visible_tables(entries, plan.requests[rows], visible)
        if self._indexer is None or memory.index is None or index is None:
            return tables, visible
        queries, weights = (tensor.index_select(0, rows) for tensor in index)
        return self._indexer.choose(queries, weights, tables, visible, memory.index)

    def _parts(self, plan: RoundPlan, entries: EntryPlan | None) -> list[slice]:
        """Rows that one call computes."""
        total = len(plan.seen)
        longest = self._config.window + (max(entries.visible) if entries else 0)
        size = 1 if self._one_by_one else max(1, GATHERED // (longest * self._config.head_dim))
        return [slice(at, min(at + size, total)) for at in range(0, total, size)]

    def _project_out(self, mixed: Tensor) -> Tensor:
        """Project groups of heads apart, then all together: [T, hidden]."""
        groups = mixed.view(len(mixed), len(self._out_groups), -1).unbind(1)
        pairs = zip(self._out_groups, groups, strict=True)
        return self._out(torch.cat([project(part.contiguous()) for project, part in pairs], 1))


def _shown(numbers: tuple[int, ...], width: int, *, from_end: bool) -> Tensor:
    """[R, width] bool: the first, or the last, so many of each line."""
    places = torch.arange(width).flip(0) if from_end else torch.arange(width)
    return places < torch.tensor(numbers).unsqueeze(1)


def _attend(queries: Tensor, keys: Tensor, shown: Tensor, sink: Tensor) -> Tensor:
    """Attention of rows that have keys of their own: [R, heads, D].

    Source: Vaswani et al. 2017, equation 1, with one more term in the denominator (the sink).

    Args:
        queries: [R, heads, D].
        keys: [R, N, D], which are the values too.
        shown: [R, N] bool: the row attends to the key.
        sink: [heads, 1].
    """
    scores = torch.bmm(queries, keys.transpose(1, 2)).mul_(queries.shape[-1] ** -0.5)
    scores.masked_fill_(~shown.unsqueeze(1), float("-inf"))
    best = torch.maximum(scores.amax(-1, keepdim=True), sink)
    weights = by_vectors(torch.exp, scores - best)
    total = weights.sum(-1, keepdim=True).add_(by_vectors(torch.exp, sink - best))
    return torch.bmm(weights, keys).div_(total)
