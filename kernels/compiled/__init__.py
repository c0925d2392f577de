"""The kernel set `jit`: a decoder's whole round as one job of compiled x86-64 code.

Numba compiles the Python of this package when the job is first used. A row's result depends on that
row alone, and every sum runs in a fixed order. So results are bit-identical alone and in a batch,
whole and in chunks, on one thread and on many. Tokens are drawn with the operators of `torch`.

step.py        the job: phases of work that threads share
phases.py      how threads wait for each other
attention.py, rows.py, products.py   the work on tiles, rows and panels
experts.py, routing.py, expert_buffers.py   layers with experts: phases, choices, buffers
tiles.py, narrow_tiles.py, primitives.py   vector instructions and atomics that Python lacks
job.py         the tables through which Python describes a round
program.py, team.py, packing.py, pages.py   buffers, threads, weights, memory
rounds.py      the set's `WholeRounds`
int8.py, int8_short_cache.py, bfloat16.py   the sets `jit-int8`, `jit-int8-kv16`, `jit-bf16-kv16`
machine.py     what the processor supports; cache.py   where compiled code is kept
"""

from dataclasses import replace

from kernels.compiled import machine
from kernels.interface import Kernels
from kernels.torch import KERNELS as TORCH
from kernels.whole_rounds import WholeRounds

_SHORTEST = 4
"""Lanes of the narrowest vector (`tiles.SHORT`, which cannot be imported without numba)."""


def _whole_rounds() -> WholeRounds:
    # Imported for use, not before: the import compiles the job.
    from kernels.compiled.packing import pack_floats
    from kernels.compiled.rounds import CompiledRounds

    return CompiledRounds(pack_floats)


KERNELS: Kernels = replace(TORCH, name="jit", uses_kept_rows=False, whole_rounds=_whole_rounds)


def usable(sizes: tuple[int, ...]) -> bool:
    """Whether this machine can compile the set, and vectors fit the model.

    Args:
        sizes: widths of the model's narrowest products, in elements.
    """
    return machine.usable() and not any(size % _SHORTEST for size in sizes)
