"""Checks that this machine's integer product is exact and fast enough.

Without VNNI, oneDNN adds pairs of products in 16 bits, where large values saturate. On a machine
that it has no code for, it runs plain loops, a hundred times slower than float32.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.interface import UnsupportedError
from kernels.torch.int8.product import ZERO_POINT, integer_product, prepack

SLOWEST = 10.0
"""Longest accepted time, as a multiple of the float32 product's. Load from other processes stays
below it; plain loops exceed it."""
_ROWS, _SIZE, _TRIES, _RUNS = 8, 256, 5, 5


def require_integer_product() -> None:
    """Multiply the largest quantized values and compare with the exact result.

    Raises:
        UnsupportedError: the product is missing, inexact or too slow; the message names `dtype`.
    """
    x = torch.full((_ROWS, _SIZE), 255, dtype=torch.uint8)
    x[:, 1::3] = 1
    weight = torch.full((_SIZE, _SIZE), 127, dtype=torch.int8)
    weight[1::2] = -127
    scales, zeros = torch.full((_SIZE,), 0.5), torch.zeros(_SIZE, dtype=torch.int32)
    try:
        packed = prepack(weight)
        got = integer_product(x, packed, scales, zeros)
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        raise UnsupportedError(
            f"dtype=int8: this build of torch has no integer product for this CPU ({error}); "
            "use float32 or bfloat16"
        ) from error
    want = ((x.int() - ZERO_POINT) @ weight.T.int()).float() * 0.5
    if not torch.equal(got, want):
        raise UnsupportedError(
            "dtype=int8: this CPU's integer product overflows (it has no VNNI); "
            "use float32 or bfloat16"
        )
    wide, floats = x.float(), weight.T.float()
    slower = min(
        _best(lambda: integer_product(x, packed, scales, zeros))
        / _best(lambda: torch.mm(wide, floats))
        for _ in range(_TRIES)
    )
    if slower > SLOWEST:
        raise UnsupportedError(
            f"dtype=int8: on this CPU the integer product takes {slower:.0f} times as long as the "
            "float32 product; use float32 or bfloat16"
        )


def _best(work: Callable[[], Tensor]) -> float:
    times = []
    for _ in range(_RUNS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)
