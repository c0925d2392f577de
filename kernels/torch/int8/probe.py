"""Whether this machine multiplies integers exactly, and faster than by plain loops.

Without VNNI, oneDNN adds pairs of products in 16 bits, where large ones saturate; where it has no
code for a machine it runs plain loops, a hundred times slower than float32.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

from kernels.interface import UnsupportedError
from kernels.torch.int8.product import ZERO_POINT, integer_product, prepack

SLOWEST = 10.0
"""Times float32's product; a busy neighbour costs less, plain loops more."""
_ROWS, _SIZE, _TRIES, _RUNS = 8, 256, 5, 5


def require_integer_product() -> None:
    """Multiply the largest levels that there are.

    Raises:
        UnsupportedError: naming `dtype` and why it does not work here.
    """
    x = torch.full((_ROWS, _SIZE), 255, dtype=torch.uint8)
    x[:, 1::3] = 1
    levels = torch.full((_SIZE, _SIZE), 127, dtype=torch.int8)
    levels[1::2] = -127
    scales, zeros = torch.full((_SIZE,), 0.5), torch.zeros(_SIZE, dtype=torch.int32)
    try:
        packed = prepack(levels)
        got = integer_product(x, packed, scales, zeros)
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        raise UnsupportedError(
            f"dtype=int8: this build of torch has no integer product for this CPU ({error}); "
            "use float32 or bfloat16"
        ) from error
    want = ((x.int() - ZERO_POINT) @ levels.T.int()).float() * 0.5
    if not torch.equal(got, want):
        raise UnsupportedError(
            "dtype=int8: this CPU's integer product overflows (it has no VNNI); "
            "use float32 or bfloat16"
        )
    wide, floats = x.float(), levels.T.float()
    slower = min(
        _best(lambda: integer_product(x, packed, scales, zeros))
        / _best(lambda: torch.mm(wide, floats))
        for _ in range(_TRIES)
    )
    if slower > SLOWEST:
        raise UnsupportedError(
            f"dtype=int8: the integer product takes {slower:.0f} times float32's on this CPU; "
            "use float32 or bfloat16"
        )


def _best(work: Callable[[], Tensor]) -> float:
    times = []
    for _ in range(_RUNS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)
