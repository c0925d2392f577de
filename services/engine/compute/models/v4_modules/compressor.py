"""Makes one key of several positions: of non-overlapping windows, or of windows that overlap.

Each position has values and scores. An entry is the sum of its positions' values, weighted per
element with the softmax of their scores, then normed and rotated. In a layer of kind "indexed" a
row is twice as wide: an entry reads the first half of the rows of the window before its own, and
the second half of its own window's rows.
"""

import torch
from torch import Tensor

from kernels.interface import Kernels
from services.engine.compute.models.v4_modules.fixed_order import pool
from services.engine.compute.models.v4_modules.memory import CompressorMemory, row_width
from services.engine.compute.models.v4_modules.rotary import rotate
from services.engine.compute.models.v4_modules.round_plan import EntryPlan
from services.engine.compute.models.weights import WeightReader
from services.engine.contract.deepseek_v4 import DeepseekV4Config, V4Layer


class Compressor:
    """Of one layer: of its keys, or of its index keys."""

    def __init__(
        self,
        config: DeepseekV4Config,
        kernels: Kernels,
        reader: WeightReader,
        at: str,
        layer: V4Layer,
        width: int,
    ) -> None:
        """Pack the weights.

        Args:
            at: name prefix of the compressor's tensors.
            width: elements of an entry.

        Raises:
            ModelFileError: a tensor is missing or of the wrong shape.
        """
        self._kernels = kernels
        self._eps = config.rms_norm_eps
        self._ratio, self._width = layer.ratio, width
        self._overlaps = layer.kind == "indexed"
        wide = row_width(layer, width)
        names = (f"{at}.wkv.weight", f"{at}.wgate.weight")
        both = torch.cat([reader(name, wide, config.hidden_size) for name in names])
        self._project = kernels.pack(both)
        self._bias = reader(f"{at}.ape", layer.ratio, wide)
        self._norm = reader(f"{at}.norm.weight", width)

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights, in bytes."""
        return self._project.nbytes + self._bias.nbytes + self._norm.nbytes

    def write_entries(
        self, x: Tensor, cos_sin: Tensor, plan: EntryPlan, memory: CompressorMemory
    ) -> None:
        """Write the entries that the round completes, and keep the rows of those to come.

        Args:
            x: [T, hidden] normed rows of the round.
            cos_sin: [positions, rope_dim / 2, 2], of all positions.
        """
        rows = self._project(x).view(len(x), 2, -1)
        rows[:, 1].add_(self._bias[plan.phases])
        if len(plan.positions):
            made = self._make(plan.ring.join(memory.rows, rows), plan)
            rotate(made, cos_sin[plan.positions])
            memory.entries.flatten(0, 1).index_copy_(0, plan.slots, made.to(memory.entries.dtype))
        plan.ring.keep(memory.rows, rows)

    def _make(self, rows: Tensor, plan: EntryPlan) -> Tensor:
        """Normed entries [E, width] of a pool of rows [N, 2, wide]."""
        own = rows[plan.index[:, -self._ratio :]][..., -self._width :]
        if self._overlaps:
            before = rows[plan.index[:, : self._ratio]][..., : self._width]
            missing = plan.missing[:, : self._ratio, None]
            before[:, :, 1].masked_fill_(missing, float("-inf"))
            own = torch.cat((before, own), dim=1)
        mixed = pool(own[:, :, 0], own[:, :, 1])
        return self._kernels.rms_norm(mixed, self._norm, self._eps)
