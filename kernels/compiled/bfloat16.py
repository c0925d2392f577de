"""The kernel set `jit-bf16`: as `jit`, with weights in bfloat16.

Activations, sums, keys and values stay float32: results equal those of `jit` on the rounded
weights, to the bit.
"""

from dataclasses import replace

from kernels import compiled
from kernels.interface import Kernels
from kernels.whole_rounds import WholeRounds


def _whole_rounds() -> WholeRounds:
    # Imported for use, not before: the import compiles the job.
    from kernels.compiled.packing import pack_bfloat16
    from kernels.compiled.rounds import CompiledRounds

    return CompiledRounds(pack_bfloat16)


KERNELS: Kernels = replace(compiled.KERNELS, name="jit-bf16", whole_rounds=_whole_rounds)
usable = compiled.usable
