"""Chooses the compressed entries that each row of an indexed layer attends to.

An entry's score is the sum over index heads of a row's head weight times ReLU(query · key). The
best entries that are visible to the row are chosen.
"""

import torch
from torch import Tensor

from kernels.interface import Kernels
from services.engine.compute.models.v4_modules.compressor import Compressor
from services.engine.compute.models.v4_modules.memory import CompressorMemory
from services.engine.compute.models.v4_modules.rotary import rotate
from services.engine.compute.models.v4_modules.round_plan import EntryPlan
from services.engine.compute.models.weights import WeightReader
from services.engine.contract.deepseek_v4 import DeepseekV4Config, V4Layer


class Indexer:
    """Of one layer: index queries, head weights, and a compressor that makes the index keys."""

    def __init__(
        self,
        config: DeepseekV4Config,
        kernels: Kernels,
        reader: WeightReader,
        at: str,
        layer: V4Layer,
    ) -> None:
        """Pack the weights of the indexer whose tensors begin with `at`.

        Raises:
            ModelFileError: a tensor is missing or of the wrong shape.
        """
        heads, dim = config.index_heads, config.index_dim
        self._heads, self._dim, self._top_k = heads, dim, config.index_top_k
        self.compressor = Compressor(config, kernels, reader, f"{at}.compressor", layer, dim)
        query = reader(f"{at}.wq_b.weight", heads * dim, config.query_rank)
        self._query = kernels.pack(query)
        weigh = reader(f"{at}.weights_proj.weight", heads, config.hidden_size)
        self._weigh = kernels.pack(weigh)

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights, in bytes."""
        return self.compressor.nbytes + self._query.nbytes + self._weigh.nbytes

    def queries(self, x: Tensor, low_rank: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated index queries [T, heads, D], and weights of the heads [T, heads].

        Args:
            x: [T, hidden] normed rows.
            low_rank: [T, query_rank] normed low-rank queries.
            cos_sin: [T, rope_dim / 2, 2].
        """
        queries = self._query(low_rank).view(len(x), self._heads, self._dim)
        rotate(queries, cos_sin)
        # Both constants are factored out of the sum over heads: ReLU keeps positive factors.
        return queries, self._weigh(x).mul_((self._heads * self._dim) ** -0.5)

    def choose(
        self,
        queries: Tensor,
        weights: Tensor,
        tables: Tensor,
        visible: tuple[int, ...],
        memory: CompressorMemory,
    ) -> tuple[Tensor, tuple[int, ...]]:
        """Entries that the rows [R] attend to.

        Args:
            queries: [R, heads, D].
            weights: [R, heads].
            tables: [R, entries]: slots of each row's entries, at least the visible ones.
            visible: per row: entries that it may attend to, which are the first ones.

        Returns:
            Slots [R, chosen] of entries in their own order, and the number per row; what exceeds
            it in a line is padding.
        """
        count = min(self._top_k, tables.shape[1])
        if max(visible) <= count:
            return tables[:, :count], visible
        keys = memory.entries.flatten(0, 1)[tables]
        scores = torch.bmm(queries, keys.float().transpose(1, 2)).relu_()
        scores = torch.bmm(weights.unsqueeze(1), scores).squeeze(1)
        places = torch.arange(tables.shape[1])
        scores.masked_fill_(places >= torch.tensor(visible).unsqueeze(1), float("-inf"))
        # Invisible entries have the highest numbers: if they are chosen at all, they come last.
        chosen = scores.topk(count, dim=1).indices.sort(dim=1).values
        return tables.gather(1, chosen), tuple(min(count, number) for number in visible)


def visible_tables(plan: EntryPlan, requests: Tensor, visible: tuple[int, ...]) -> Tensor:
    """Slots [R, entries] of the first entries of each row's request, as many as any row needs."""
    return plan.tables[requests, : max(visible)]
