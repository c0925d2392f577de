"""Weights in the order in which tiles read them."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.compiled.tiles import PANEL

_LEVELS = 127
_ZERO = 128
_TINY = 1e-30


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [out, in] as panels of PANEL outputs; outputs that are missing are zeros."""

    panels: Tensor
    """[panels, in, PANEL] float32, or [panels, in / 4, PANEL, 4] uint8: int8 plus 128."""
    scales: Tensor | None
    """[panels * PANEL] float32, of bytes alone."""

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes + (0 if self.scales is None else self.scales.nbytes)


def pack_floats(weight: Tensor) -> PackedWeight:
    """As it is."""
    whole = pad(weight.float(), (0, 0, 0, -weight.shape[0] % PANEL))
    panels = whole.view(-1, PANEL, weight.shape[1]).transpose(1, 2).contiguous()
    return PackedWeight(panels, None)


def pack_bytes(weight: Tensor) -> PackedWeight:
    """With a scale per output; the largest value is 127 steps.

    Inputs that are missing in the last four are bytes of 0, not of the zero level: whatever an
    earlier product has left in their place among the activations, it counts nothing.
    """
    steps = weight.float().abs().amax(-1, keepdim=True).div_(_LEVELS).clamp_min_(_TINY)
    levels = weight.float().div(steps).round_().add_(_ZERO).to(torch.uint8)
    outputs, inputs = weight.shape
    whole = pad(levels, (0, -inputs % 4, 0, -outputs % PANEL))
    fours = whole.view(whole.shape[0] // PANEL, PANEL, -1, 4).transpose(1, 2).contiguous()
    return PackedWeight(fours, pad(steps.view(-1), (0, -outputs % PANEL)))
