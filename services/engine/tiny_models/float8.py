"""Rounds to FP8 (e4m3, without infinities) and to bfloat16, as numpy has neither."""

import numpy as np
from numpy.typing import NDArray

LARGEST = 448.0
_EXPONENT_BIAS = 7
_MANTISSA = 8
"""Codes per power of two."""


def _magnitudes() -> NDArray[np.float32]:
    """[127] the values of the codes 0 to 126, in order; 127 is NaN."""
    codes = np.arange(127)
    exponent, fraction = codes // _MANTISSA, codes % _MANTISSA
    normal = (1 + fraction / _MANTISSA) * 2.0 ** (exponent - _EXPONENT_BIAS)
    small = fraction / _MANTISSA * 2.0 ** (1 - _EXPONENT_BIAS)
    return np.where(exponent > 0, normal, small).astype(np.float32)


MAGNITUDES = _magnitudes()
_MIDDLES = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2


def e4m3_codes(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Codes of the nearest FP8 values; of two, the even code; larger values become 448."""
    size = np.abs(values)
    code = np.searchsorted(_MIDDLES, size, side="left")
    middle = _MIDDLES[np.minimum(code, len(_MIDDLES) - 1)]
    code += (size == middle) & (code % 2 == 1)
    code = np.minimum(code, len(MAGNITUDES) - 1)
    signed: NDArray[np.uint8] = (code + 128 * np.signbit(values)).astype(np.uint8)
    return signed


def bfloat16_bits(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16 values; of two, the even ones. Values must be finite."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
