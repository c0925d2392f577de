"""Rounding of float32 to a number format, to nearest with ties to even."""

import triton
import triton.language as tl

from kernels.triton.interpreted import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """x in `dtype`. The interpreter cuts bits off for bfloat16: it is given what is rounded."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, rounded, bits).to(tl.float32, bitcast=True)
    return x.to(dtype)
