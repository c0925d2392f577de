"""Packs weights in the order in which the tiles of a product read them."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernels.compiled.tiles import PANEL
from kernels.whole_rounds import PackedWeight

_MAX_INT8 = 127
_ZERO_POINT = 128
_TINY = 1e-30
"""Smallest scale, so that a row of zeros is not divided by 0."""


def pack_floats(weight: Tensor) -> PackedWeight:
    """Pack a weight [out, in] in float32."""
    padded = pad_outputs(weight.float())
    panels = padded.view(-1, PANEL, weight.shape[1]).transpose(1, 2).contiguous()
    return PackedWeight(panels, None)


def pack_bfloat16(weight: Tensor) -> PackedWeight:
    """Pack a weight [out, in], rounded to bfloat16: adjacent inputs share a word."""
    padded = pad_outputs(pad(weight.bfloat16(), (0, weight.shape[1] % 2)))
    pairs = padded.view(padded.shape[0] // PANEL, PANEL, -1, 2).transpose(1, 2).contiguous()
    return PackedWeight(pairs, None)


def pack_int8(weight: Tensor) -> PackedWeight:
    """Quantize and pack a weight [out, in]: one scale per output, largest value 127 steps.

    Inputs that pad the last group of four are the byte 0, not the zero point. So whatever an
    earlier product left among the activations there, its product with the padding is 0.
    """
    scales = weight.float().abs().amax(-1, keepdim=True).div_(_MAX_INT8).clamp_min_(_TINY)
    quantized = weight.float().div(scales).round_().add_(_ZERO_POINT).to(torch.uint8)
    padded = pad_outputs(pad(quantized, (0, -weight.shape[1] % 4)))
    fours = padded.view(padded.shape[0] // PANEL, PANEL, -1, 4).transpose(1, 2).contiguous()
    return PackedWeight(fours, pad_outputs(scales.view(-1)))


def pad_outputs(tensor: Tensor) -> Tensor:
    """Pad a weight [out, in], or a vector [out], with zeros to whole panels of outputs."""
    missing = -tensor.shape[0] % PANEL
    return pad(tensor, (0,) * (2 * tensor.dim() - 1) + (missing,)).contiguous()


def whole_panels(count: int) -> int:
    """The number of outputs, rounded up to whole panels."""
    return count + -count % PANEL
