"""A round of a dense decoder as one job of machine code, compiled from Python when it is first run.

Everything that a row meets depends on that row alone, in an order that is written down: so results
are the same alone and in a batch, whole and in chunks, on one thread and on many. Drawing tokens is
torch's work.
"""

from dataclasses import replace

from kernels.torch import KERNELS as TORCH

KERNELS = replace(TORCH, name="jit", keeps_rows=False)
