"""The kernel set `jit-int8-kv16`: as `jit-int8`, with keys and values in bfloat16."""

from dataclasses import replace

import torch

from kernels.compiled import int8
from kernels.interface import Kernels
from kernels.whole_rounds import WholeRounds


def _whole_rounds() -> WholeRounds:
    # Imported for use, not before: the import compiles the job.
    from kernels.compiled.packing import pack_int8
    from kernels.compiled.rounds import CompiledRounds

    return CompiledRounds(pack_int8, torch.bfloat16)


KERNELS: Kernels = replace(int8.KERNELS, name="jit-int8-kv16", whole_rounds=_whole_rounds)
usable = int8.usable
