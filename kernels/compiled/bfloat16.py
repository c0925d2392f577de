"""The kernel set `jit-bf16-kv16`: as `jit`, with weights, keys and values in bfloat16.

Activations and sums stay float32. Its name says how keys and values are stored, because they change
results: engines with another name have another `numerics_id`.
"""

from dataclasses import replace

import torch

from kernels import compiled
from kernels.interface import Kernels
from kernels.whole_rounds import WholeRounds


def _whole_rounds() -> WholeRounds:
    # Imported for use, not before: the import compiles the job.
    from kernels.compiled.packing import pack_bfloat16
    from kernels.compiled.rounds import CompiledRounds

    return CompiledRounds(pack_bfloat16, torch.bfloat16)


KERNELS: Kernels = replace(compiled.KERNELS, name="jit-bf16-kv16", whole_rounds=_whole_rounds)
usable = compiled.usable
