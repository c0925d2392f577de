"""`kernels.whole_rounds.WholeRounds` of the compiled sets."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kernels.compiled.packing import pack_floats
from kernels.compiled.pages import Arena, zeros
from kernels.compiled.program import Program
from kernels.whole_rounds import DecoderShape, LayerWeights, PackedWeight


class CompiledRounds:
    """One model's weights in large pages, and its program."""

    def __init__(
        self,
        pack: Callable[[Tensor], PackedWeight],
        cache_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.cache_dtype = cache_dtype
        self._pack = pack
        self._arena = Arena()

    def pack(self, weight: Tensor) -> PackedWeight:
        """See WholeRounds."""
        packed = self._pack(weight)
        return replace(packed, panels=self._arena.copy(packed.panels))

    def pack_router(self, weight: Tensor) -> PackedWeight:
        """See WholeRounds."""
        return pack_floats(weight)

    def pack_experts(self, count: int, read: Callable[[int], Tensor]) -> PackedWeight:
        """See WholeRounds; one expert at a time is in memory twice."""
        panels = scales = None
        for expert in range(count):
            one = self._pack(read(expert))
            if panels is None:
                shape = (count * one.panels.shape[0], *one.panels.shape[1:])
                panels = self._arena.empty(shape, one.panels.dtype)
                if one.scales is not None:
                    scales = one.scales.new_empty(count * len(one.scales))
            at = expert * one.panels.shape[0]
            panels[at : at + one.panels.shape[0]] = one.panels
            if scales is not None and one.scales is not None:
                scales[expert * len(one.scales) : (expert + 1) * len(one.scales)] = one.scales
        if panels is None:
            raise ValueError(f"count is {count}, it must be at least 1")
        return PackedWeight(panels, scales)

    def cache(self, shape: tuple[int, ...]) -> Tensor:
        """See WholeRounds."""
        return zeros(shape, self.cache_dtype)

    def program(
        self,
        shape: DecoderShape,
        layers: Sequence[LayerWeights],
        norm: Tensor,
        head: PackedWeight,
        threads: int,
    ) -> Program:
        """See WholeRounds."""
        return Program(shape, layers, norm, head, threads)
