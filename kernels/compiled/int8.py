"""The kernel set `jit-int8`: as `jit`, with weights and inputs of products in int8."""

from dataclasses import replace

from kernels import compiled
from kernels.compiled import machine
from kernels.interface import Kernels
from kernels.whole_rounds import WholeRounds


def _whole_rounds() -> WholeRounds:
    # Imported for use, not before: the import compiles the job.
    from kernels.compiled.packing import pack_int8
    from kernels.compiled.rounds import CompiledRounds

    return CompiledRounds(pack_int8)


KERNELS: Kernels = replace(compiled.KERNELS, name="jit-int8", whole_rounds=_whole_rounds)


def usable(sizes: tuple[int, ...]) -> bool:
    """As for `jit`, on processors that multiply bytes (AVX-512 VNNI)."""
    return compiled.usable(sizes) and machine.machine().byte_products
