"""What attention of V4 and V4.1 share: projections, the softmax with a sink, the grouped output.

All heads share one vector per position, which is key and value. The vector is rotated, so a value
carries the rotation of its position; the output is rotated back by the row's own position, which
leaves the distance. A learned score per head (the sink) takes part in the softmax without a value.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.interface import Kernels
from services.engine.compute.models.v4_modules.fixed_order import by_vectors
from services.engine.compute.models.v4_modules.rotary import rotate
from services.engine.compute.models.v4_modules.round_plan import RoundPlan
from services.engine.compute.models.weights import WeightReader
from services.engine.contract.deepseek_v4 import DeepseekSizes

GATHERED = 1 << 22
"""Elements of keys that one call of `_attend` gathers, at most: it bounds memory."""

ChooseEntries = Callable[[slice], tuple[Tensor, tuple[int, ...]] | None]
"""Of some rows of the round: slots [R, N] of the compressed entries that each attends to, and their
number per row; what exceeds it in a line is padding. None: no row has any."""


class SharedAttention:
    """One layer's projections, and attention over its window and chosen entries."""

    def __init__(
        self,
        config: DeepseekSizes,
        kernels: Kernels,
        reader: WeightReader,
        at: str,
        *,
        head_norms: bool,
    ) -> None:
        """Pack the weights of the layer whose tensors begin with `at`.

        Args:
            head_norms: queries are normed by head, without weights.

        Raises:
            ModelFileError: a tensor is missing or of the wrong shape.
        """
        hidden, dim, rank = config.hidden_size, config.head_dim, config.query_rank
        self._config, self._kernels = config, kernels
        joined = (
            reader(f"{at}.wq_a.weight", rank, hidden),
            reader(f"{at}.wkv.weight", dim, hidden),
        )
        self._low = kernels.pack(torch.cat(joined))
        self._query_norm = reader(f"{at}.q_norm.weight", rank)
        self._key_norm = reader(f"{at}.kv_norm.weight", dim)
        self._head_norm = torch.ones_like(self._key_norm) if head_norms else None
        heads = config.num_heads * dim
        self._query = kernels.pack(reader(f"{at}.wq_b.weight", heads, rank))
        self._sink = reader(f"{at}.attn_sink", config.num_heads).view(-1, 1)
        groups, wide = config.output_groups, config.output_rank
        first = reader(f"{at}.wo_a.weight", groups * wide, heads // groups)
        self._out_groups = [kernels.pack(part) for part in torch.split(first, wide)]
        self._out = kernels.pack(reader(f"{at}.wo_b.weight", hidden, groups * wide))

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights, in bytes."""
        parts = (self._low, self._query, self._out, *self._out_groups)
        rows = (self._query_norm, self._key_norm, self._head_norm, self._sink)
        return sum(part.nbytes for part in (*parts, *rows) if part is not None)

    def low_rank(self, x: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
        """Normed low-rank queries [T, query_rank], and rotated keys [T, D], of rows [T, hidden].

        Args:
            turned: [T, rope_dim / 2, 2]: angles of the rows.
        """
        low = self._low(x)
        rank = self._config.query_rank
        queries = self._norm(low[:, :rank], self._query_norm)
        keys = self._norm(low[:, rank:], self._key_norm)
        rotate(keys, turned)
        return queries, keys

    def queries(self, low_rank: Tensor, turned: Tensor) -> Tensor:
        """Rotated queries [T, heads, D]."""
        config = self._config
        queries = self._query(low_rank).view(-1, config.head_dim)
        if self._head_norm is not None:
            queries = self._kernels.rms_norm(queries, self._head_norm, config.rms_norm_eps)
        queries = queries.view(len(low_rank), config.num_heads, config.head_dim)
        rotate(queries, turned)
        return queries

    def attend(
        self,
        queries: Tensor,
        turned: Tensor,
        latest: Tensor,
        plan: RoundPlan,
        entries: Tensor | None,
        choose: ChooseEntries,
        most_entries: int,
    ) -> Tensor:
        """The layer's output [T, hidden] for queries [T, heads, D].

        Args:
            latest: [N, D]: the pool of keys that `plan.window` counts in.
            entries: [blocks, entries per block, D]: where `choose` has its slots; None: nowhere.
            most_entries: entries that a row attends to, at most.
        """
        mixed = torch.empty_like(queries)
        for part in row_parts(
            len(plan.seen),
            (self._config.window + most_entries) * self._config.head_dim,
            self._kernels,
        ):
            first = self._config.window - max(plan.seen[part])
            keys = [latest[plan.window[part, first:]]]
            shown = [_shown(plan.seen[part], keys[0].shape[1], from_end=True)]
            chosen = None if entries is None else choose(part)
            if entries is not None and chosen is not None:
                slots, numbers = chosen
                keys.append(entries.flatten(0, 1)[slots].to(queries.dtype))
                shown.append(_shown(numbers, slots.shape[1], from_end=False))
            # A copy: its alignment does not depend on the rows before it.
            own = queries[part].clone()
            mixed[part] = _attend(own, torch.cat(keys, 1), torch.cat(shown, 1), self._sink)
        rotate(mixed, turned, back=True)
        return self._project_out(mixed)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._kernels.rms_norm(x.contiguous(), weight, self._config.rms_norm_eps)

    def _project_out(self, mixed: Tensor) -> Tensor:
        """Project groups of heads apart, then all together: [T, hidden]."""
        groups = mixed.view(len(mixed), len(self._out_groups), -1).unbind(1)
        pairs = zip(self._out_groups, groups, strict=True)
        return self._out(torch.cat([project(part.contiguous()) for project, part in pairs], 1))


def row_parts(total: int, elements: int, kernels: Kernels) -> list[slice]:
    """Rows that one call computes, so that it gathers GATHERED elements at most.

    In `deterministic` a call has one row: the shapes of its products then depend on the row's
    position only.

    Args:
        elements: gathered for each row.
    """
    size = 1 if kernels.name == "torch-tiled" else max(1, GATHERED // elements)
    return [slice(at, min(at + size, total)) for at in range(0, total, size)]


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
