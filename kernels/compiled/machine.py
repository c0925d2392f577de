"""What the processor supports, and the shape of the register tiles that follows from it."""

import functools
import importlib.util
import platform
from dataclasses import dataclass
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class Machine:
    """Shape of the register tiles: as large as the vector registers allow."""

    lanes: int
    """float32 values in a vector."""
    rows: int
    """Rows of a tile. Its columns are PANEL_VECTORS vectors."""
    byte_products: bool
    """One instruction sums four products of bytes into 32 bits (AVX-512 VNNI)."""
    byte_pairs: bool = False
    """Without it: one instruction sums two products of 16 bits into 32 bits (AVX2)."""


PANEL_VECTORS = 3
"""Vectors side by side in a tile: 3 * 8 sums, 3 weights and a factor fill 32 registers."""


@functools.cache
def machine() -> Machine:
    """The machine that this process runs on."""
    features = _features()
    if "avx512f" in features:
        return Machine(lanes=16, rows=8, byte_products="avx512vnni" in features)
    return Machine(lanes=8, rows=4, byte_products=False, byte_pairs=True)


@functools.cache
def usable() -> bool:
    """Whether kernels can be compiled here: x86-64 with AVX2, Linux's semaphores, numba."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    if importlib.util.find_spec("numba") is None:
        return False
    return {"avx2", "fma"} <= _features()


def _features() -> set[str]:
    """Instruction sets to compile for: NUMBA_CPU_FEATURES if it is set, else the processor's."""
    import llvmlite.binding as llvm  # installed on x86-64 Linux only, as is numba
    import numba

    configured: str | None = cast("Any", numba.config).CPU_FEATURES
    if configured is not None:
        return {name[1:] for name in configured.split(",") if name.startswith("+")}
    return {name for name, has in llvm.get_host_cpu_features().items() if has}
