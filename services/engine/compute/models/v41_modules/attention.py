"""Attention of one layer: over the latest positions, and over the entries that were last chosen.

`v4_modules/shared_attention.py` has the softmax and the projections.
"""

from torch import Tensor

from kernels.interface import Kernels
from services.engine.compute.models.v4_modules.round_plan import RoundPlan
from services.engine.compute.models.v4_modules.shared_attention import SharedAttention
from services.engine.compute.models.v41_modules.compressor import Compressor
from services.engine.compute.models.v41_modules.memory import LayerMemory
from services.engine.compute.models.v41_modules.quantisers import round_window_keys
from services.engine.compute.models.v41_modules.selection import Choice, Selection
from services.engine.compute.models.weights import WeightReader
from services.engine.contract.deepseek_v41 import DeepseekV41Config


class V41Attention:
    """Compressor and index of one layer, if it has them, beside its attention."""

    def __init__(
        self,
        config: DeepseekV41Config,
        kernels: Kernels,
        reader: WeightReader,
        at: str,
        index: int,
    ) -> None:
        """Pack the weights of the layer whose tensors begin with `at`.

        Args:
            index: of the layer.

        Raises:
            ModelFileError: a tensor is missing or of the wrong shape.
        """
        layer = config.layers[index]
        self._layer = layer
        self._shared = SharedAttention(config, kernels, reader, at, head_norms=False)
        self._compressor: Compressor | None = None
        self._selection: Selection | None = None
        if layer.source == index:
            self._compressor = Compressor(config, kernels, reader, at, layer.ratio)
        if layer.chooses:
            self._selection = Selection(config, kernels, reader, f"{at}.indexer", index)

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights, in bytes."""
        parts = (self._shared, self._compressor, self._selection)
        return sum(part.nbytes for part in parts if part is not None)

    def __call__(
        self, x: Tensor, cos_sin: Tensor, plan: RoundPlan, memory: LayerMemory, choice: Choice
    ) -> Tensor:
        """The layer's output [T, hidden] for the normed rows x [T, hidden].

        Keys, entries and open rows are written to the memory.

        Args:
            cos_sin: [positions, rope_dim / 2, 2], of all positions.
            choice: of the layers before; a layer with an index puts its own there.
        """
        turned = cos_sin[plan.positions]
        low_rank, keys = self._shared.low_rank(x, turned)
        keys = round_window_keys(keys)
        latest = plan.ring.join(memory.window, keys)
        plan.ring.keep(memory.window, keys)
        if self._compressor is not None:
            self._compressor.write(x, cos_sin, plan.entries[self._layer.ratio], memory)
        if self._selection is not None:
            assert memory.keys is not None, "the layer chooses among no entries"
            self._selection.choose(x, low_rank, turned, plan, memory.keys, choice)
        chosen = choice.entries if self._layer.ratio else None

        def choose(part: slice) -> tuple[Tensor, tuple[int, ...]] | None:
            if chosen is None or not max(chosen.counts[part]):
                return None
            counts = chosen.counts[part]
            return chosen.places[part, : max(counts)], counts

        queries = self._shared.queries(low_rank, turned)
        most = max(chosen.counts) if chosen is not None else 0
        return self._shared.attend(queries, turned, latest, plan, memory.entries, choose, most)
