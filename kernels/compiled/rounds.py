"""`kernels.whole_rounds.WholeRounds` of the compiled sets."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kernels.compiled.pages import Arena, zeros
from kernels.compiled.program import Program
from kernels.whole_rounds import DecoderShape, LayerWeights, PackedWeight


class CompiledRounds:
    """One model's weights in large pages, and its program."""

    def __init__(self, pack: Callable[[Tensor], PackedWeight]) -> None:
        self._pack = pack
        self._arena = Arena()

    def pack(self, weight: Tensor) -> PackedWeight:
        """See WholeRounds."""
        packed = self._pack(weight)
        return replace(packed, panels=self._arena.copy(packed.panels))

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """See WholeRounds."""
        return self._arena.empty(shape, dtype)

    def cache(self, shape: tuple[int, ...]) -> Tensor:
        """See WholeRounds; float32."""
        return zeros(shape, torch.float32)

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
