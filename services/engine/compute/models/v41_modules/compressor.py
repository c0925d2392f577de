"""Makes compressed entries and their index keys, each of one or two positions that do not overlap.

With two positions, an entry is the sum of their values, weighted per element with the softmax of
their scores; with one there are no scores. The index key is made of the entry before its rotation.
"""

import torch
from torch import Tensor

from kernels.interface import Kernels
from services.engine.compute.models.v4_modules.fixed_order import pool
from services.engine.compute.models.v4_modules.rotary import rotate
from services.engine.compute.models.v4_modules.round_plan import EntryPlan
from services.engine.compute.models.v41_modules.memory import LayerMemory
from services.engine.compute.models.v41_modules.quantisers import round_entries, round_index
from services.engine.compute.models.weights import WeightReader
from services.engine.contract.deepseek_v41 import DeepseekV41Config


class Compressor:
    """Of one layer whose entries it and the layers after it read."""

    def __init__(
        self,
        config: DeepseekV41Config,
        kernels: Kernels,
        reader: WeightReader,
        at: str,
        ratio: int,
    ) -> None:
        """Pack the weights.

        Args:
            at: name prefix of the attention's tensors.

        Raises:
            ModelFileError: a tensor is missing or of the wrong shape.
        """
        hidden, dim, index = config.hidden_size, config.head_dim, config.index_dim
        self._kernels, self._eps = kernels, config.rms_norm_eps
        names = ("wkv", "wgate")[: 1 if ratio == 1 else 2]
        parts = [reader(f"{at}.compressor.{name}.weight", dim, hidden) for name in names]
        self._project = kernels.pack(torch.cat(parts))
        self._norm = reader(f"{at}.compressor.norm.weight", dim)
        self._index = kernels.pack(reader(f"{at}.indexer.wk.weight", index, dim))
        self._index_norm = reader(f"{at}.indexer.k_norm.weight", index)

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights, in bytes."""
        parts = (self._project, self._index, self._norm, self._index_norm)
        return sum(part.nbytes for part in parts)

    def write(self, x: Tensor, cos_sin: Tensor, plan: EntryPlan, memory: LayerMemory) -> None:
        """Write the entries that the round completes, and keep the rows of an open group.

        Args:
            x: [T, hidden] normed rows of the round.
            cos_sin: [positions, rope_dim / 2, 2], of all positions.
        """
        assert memory.entries is not None, "the layer has no history"
        assert memory.keys is not None, "the layer has no history"
        rows, ring = self._project(x), memory.rows
        if ring is not None:
            rows = rows.view(len(x), 2, -1)
        if len(plan.positions):
            latent = self._latents(rows, plan, ring)
            turned = cos_sin[plan.positions]
            keys = self._normed(self._index(latent), self._index_norm)
            rotate(keys, turned)
            rotate(latent, turned)
            _store(memory.keys, round_index(keys), plan.slots)
            _store(memory.entries, round_entries(latent), plan.slots)
        if ring is not None:
            plan.ring.keep(ring, rows)

    def _latents(self, rows: Tensor, plan: EntryPlan, ring: Tensor | None) -> Tensor:
        """Normed entries [E, D], not rotated yet."""
        if ring is None:
            return self._normed(rows[plan.index[:, 0]], self._norm)
        own = plan.ring.join(ring, rows)[plan.index]
        return self._normed(pool(own[:, :, 0], own[:, :, 1]), self._norm)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._kernels.rms_norm(x, weight, self._eps)


def _store(history: Tensor, made: Tensor, slots: Tensor) -> None:
    history.flatten(0, 1).index_copy_(0, slots, made.to(history.dtype))
