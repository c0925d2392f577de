"""The K formats of GGUF, one value at a time: a slow decoder written from the format's description.

A block has 256 values. d and dmin are float16; a value is d * scale * number - dmin * minimum, or
d * scale * (number - offset) where there are no minima. See ggml-common.h and ggml-quants.c of ggml
for the fields and their order; all sums are in float32.
"""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
F32 = np.float32


def decode_block(kind: str, block: Bytes) -> list[float]:
    """The 256 values of one block."""
    return _DECODERS[kind]([int(byte) for byte in block])


def _half(raw: list[int], at: int) -> np.float32:
    return F32(np.frombuffer(bytes(raw[at : at + 2]), np.float16)[0])


def _q2_k(raw: list[int]) -> list[float]:
    """scales [16] (4 bits of scale, 4 of minimum), qs [64], d, dmin."""
    d, dmin = _half(raw, 80), _half(raw, 82)
    out = []
    for at in range(256):
        half, rest = divmod(at, 128)
        plane, byte = divmod(rest, 32)
        number = raw[16 + 32 * half + byte] >> 2 * plane & 3
        scale = raw[at // 16]
        out.append(d * F32(scale & 15) * F32(number) - dmin * F32(scale >> 4))
    return out


def _q3_k(raw: list[int]) -> list[float]:
    """hmask [32], qs [64], scales [12] (16 of 6 bits), d."""
    d = _half(raw, 108)
    out = []
    for at in range(256):
        half, rest = divmod(at, 128)
        plane, byte = divmod(rest, 32)
        low = raw[32 + 32 * half + byte] >> 2 * plane & 3
        high = raw[byte] >> (4 * half + plane) & 1
        group = at // 16
        nibble = raw[96 + group % 8] >> 4 * (group // 8) & 15
        scale = nibble | (raw[104 + group % 4] >> 2 * (group // 4) & 3) << 4
        out.append(d * F32(scale - 32) * F32(low - (0 if high else 4)))
    return out


def _six_bits(scales: list[int], group: int) -> tuple[int, int]:
    """Scale and minimum of one of 8 groups, in 12 bytes."""
    if group < 4:
        return scales[group] & 63, scales[group + 4] & 63
    low, high = scales[group + 4], (scales[group - 4] >> 6, scales[group] >> 6)
    return low & 15 | high[0] << 4, low >> 4 | high[1] << 4


def _q4_k(raw: list[int]) -> list[float]:
    """d, dmin, scales [12], qs [128]."""
    return _with_minima(raw, lambda byte, plane: raw[16 + byte] >> 4 * plane & 15)


def _q5_k(raw: list[int]) -> list[float]:
    """d, dmin, scales [12], qh [32], qs [128]."""

    def number(byte: int, plane: int) -> int:
        group = 2 * (byte // 32) + plane
        return raw[48 + byte] >> 4 * plane & 15 | (raw[16 + byte % 32] >> group & 1) << 4

    return _with_minima(raw, number)


def _with_minima(raw: list[int], number: Callable[[int, int], int]) -> list[float]:
    d, dmin = _half(raw, 0), _half(raw, 2)
    out = []
    for at in range(256):
        group = at // 32
        scale, minimum = _six_bits(raw[4:16], group)
        byte = 32 * (group // 2) + at % 32
        out.append(d * F32(scale) * F32(number(byte, group % 2)) - dmin * F32(minimum))
    return out


def _q6_k(raw: list[int]) -> list[float]:
    """ql [128], qh [64], scales [16] int8, d."""
    d = _half(raw, 208)
    out = []
    for at in range(256):
        half, rest = divmod(at, 128)
        plane, byte = divmod(rest, 32)
        low = raw[64 * half + 32 * (plane % 2) + byte] >> 4 * (plane // 2) & 15
        high = raw[128 + 32 * half + byte] >> 2 * plane & 3
        scale = int(np.int8(np.uint8(raw[192 + at // 16])))
        out.append(d * F32(scale) * F32((low | high << 4) - 32))
    return out


_DECODERS: Mapping[str, Callable[[list[int]], list[float]]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
