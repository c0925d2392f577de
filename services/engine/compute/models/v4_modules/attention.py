"""Attention of one layer: over the latest positions, and over compressed entries where it has them.

`shared_attention.py` has the softmax and the projections.
"""

from torch import Tensor

from kernels.interface import Kernels
from services.engine.compute.models.v4_modules.compressor import Compressor
from services.engine.compute.models.v4_modules.indexer import Indexer, visible_tables
from services.engine.compute.models.v4_modules.memory import LayerMemory
from services.engine.compute.models.v4_modules.round_plan import EntryPlan, RoundPlan
from services.engine.compute.models.v4_modules.shared_attention import SharedAttention
from services.engine.compute.models.weights import WeightReader
from services.engine.contract.deepseek_v4 import DeepseekV4Config, V4Layer


class V4Attention:
    """Compressors and indexer of one layer, beside its attention."""

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
        self._layer = layer
        self._shared = SharedAttention(config, kernels, reader, at, head_norms=True)
        self._main: Compressor | None = None
        self._indexer: Indexer | None = None
        if layer.ratio:
            dim = config.head_dim
            self._main = Compressor(config, kernels, reader, f"{at}.compressor", layer, dim)
        if layer.kind == "indexed":
            self._indexer = Indexer(config, kernels, reader, f"{at}.indexer", layer)

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights, in bytes."""
        parts = (self._shared, self._main, self._indexer)
        return sum(part.nbytes for part in parts if part is not None)

    def __call__(self, x: Tensor, cos_sin: Tensor, plan: RoundPlan, memory: LayerMemory) -> Tensor:
        """The layer's output [T, hidden] for the normed rows x [T, hidden].

        Keys, entries and rows of compressors are written to the memory.

        Args:
            cos_sin: [positions, rope_dim / 2, 2], of all positions.
        """
        turned = cos_sin[plan.positions]
        low_rank, keys = self._shared.low_rank(x, turned)
        queries = self._shared.queries(low_rank, turned)
        latest = plan.ring.join(memory.window, keys)
        plan.ring.keep(memory.window, keys)
        index = self._write_entries(x, low_rank, cos_sin, plan, memory)
        entries = plan.entries.get(self._layer.ratio)

        def choose(part: slice) -> tuple[Tensor, tuple[int, ...]] | None:
            if entries is None or not max(entries.visible[part]):
                return None
            return self._choose(part, index, entries, plan, memory)

        return self._shared.attend(
            queries,
            turned,
            latest,
            plan,
            memory.main.entries if memory.main else None,
            choose,
            max(entries.visible) if entries else 0,
        )

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

    def _choose(
        self,
        part: slice,
        index: tuple[Tensor, Tensor] | None,
        entries: EntryPlan,
        plan: RoundPlan,
        memory: LayerMemory,
    ) -> tuple[Tensor, tuple[int, ...]]:
        """Slots of the entries that some rows attend to, and the number per row."""
        visible = entries.visible[part]
        tables = visible_tables(entries, plan.requests[part], visible)
        if self._indexer is None or memory.index is None or index is None:
            return tables, visible
        queries, weights = (tensor[part].clone() for tensor in index)
        return self._indexer.choose(queries, weights, tables, visible, memory.index)
