"""The kernel set `torch-int8`: products of int8 weights and int8 activations (W8A8).

Weights have a scale per output channel. Activations have a scale per row, computed at run time.
Norms, attention, activations and the residual stay in float32, as in the set `torch`.
"""

from dataclasses import replace

from kernels.torch import KERNELS as TORCH
from kernels.torch.int8.linear import Int8Linear

KERNELS = replace(TORCH, name="torch-int8", pack=Int8Linear)
