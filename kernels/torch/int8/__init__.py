"""W8A8: products of int8 weights and activations, everything else as in `kernels.torch`.

Weights have a scale per output channel, activations one per row, found as they come. Norms,
attention, activations and the residual stay in float32.
"""

from dataclasses import replace

from kernels.torch import KERNELS as TORCH
from kernels.torch.int8.linear import Int8Linear

KERNELS = replace(TORCH, name="torch-int8", pack=Int8Linear)
