"""Work on single rows between products: norms, rotation, activation, quantization, softmax.

Arguments are addresses of float32 values, unless a docstring names another type, and sizes in
elements. A row's result depends on that row alone.
"""

import math

from numpy import float32, int32

from kernels.compiled.job import HALVES
from kernels.compiled.primitives import (
    as_float,
    compiled,
    floats,
    nearest,
    ordering,
    signed_bytes,
    summing,
    words,
)

_LOG2_E = float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = float32(0.693359375), float32(-2.12194440e-4)
_LOWEST = float32(-87.0)
_HIGHEST = float32(88.0)
_P3, _P4, _P5, _P6, _P7 = (float32(1 / math.factorial(n)) for n in range(3, 8))
_MAX_INT8 = float32(127.0)
_TINY = float32(1e-30)
_MINUS_INFINITY = float32(-math.inf)


@compiled
def exponential(x: float32) -> float32:
    """e^x within 3 units in the last place; 0 below -87, NaN for NaN."""
    bounded = x if x < _HIGHEST else _HIGHEST
    bounded = bounded if bounded > _LOWEST else _LOWEST
    whole = nearest(bounded * _LOG2_E)
    rest = bounded - whole * _LN2_HIGH - whole * _LN2_LOW
    tail = _P3 + rest * (_P4 + rest * (_P5 + rest * (_P6 + rest * _P7)))
    power = float32(1.0) + rest * (float32(1.0) + rest * (float32(0.5) + rest * tail))
    exponent = int32(whole) << int32(23)
    scaled = power * as_float(exponent + int32(0x3F800000))
    if x < _LOWEST:
        return float32(0.0)
    return scaled if x == x else x


@summing
def rms_norm(x: int, weight: int, count: int, eps: float32, out: int) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight; Zhang and Sennrich 2019."""
    values, weights, normed = floats(x), floats(weight), floats(out)
    total = float32(0.0)
    for i in range(count):
        total += values[i] * values[i]
    root = float32(math.sqrt(total / float32(count) + eps))
    for i in range(count):
        normed[i] = values[i] / root * weights[i]


@summing
def quantize(x: int, count: int, out: int, scale: int, correction: int) -> None:
    """Quantize a row: out = round(x / scale) with scale = max |x| / 127.

    Args:
        x: [count] float32.
        out: [count] int8.
        scale: [1] float32, written.
        correction: [1] int32, written: 128 times the sum of `out`.
    """
    values, quantized = floats(x), signed_bytes(out)
    step = largest(x, count) / _MAX_INT8
    step = step if step > _TINY or step != step else _TINY
    total = int32(0)
    for i in range(count):
        value = int32(nearest(values[i] / step))
        quantized[i] = value
        total += value
    floats(scale)[0] = step
    words(correction)[0] = total * int32(128)


@compiled
def largest(x: int, count: int) -> float32:
    """The largest absolute value of x; NaN if x holds one.

    It compares bits: floats without a sign have the order of their bits as integers.
    """
    bits, top = words(x), int32(0)
    for i in range(count):
        size = bits[i] & int32(0x7FFFFFFF)
        top = size if size > top else top
    largest_value: float32 = as_float(int32(top))
    return largest_value


@compiled
def silu_mul(gate: int, up: int, count: int, out: int) -> None:
    """out = gate / (1 + e^-gate) * up; Shazeer 2020."""
    gates, ups, made = floats(gate), floats(up), floats(out)
    for i in range(count):
        made[i] = gates[i] / (float32(1.0) + exponential(-gates[i])) * ups[i]


@compiled
def end_row(form: int, x: int, count: int) -> None:
    """Set the value behind a row of odd length to 0 where products read pairs.

    The weight there is 0, but 0 times the NaN that an earlier product may have left is NaN.

    Args:
        form: number format of the weights; see `job`.
        x: [count + 1] float32 if `count` is odd.
    """
    if form == HALVES and count % 2:
        floats(x)[count] = float32(0.0)


@compiled
def rotate(head: int, cos_sin: int, pairs: int, scale: float32) -> None:
    """Rotate each pair (2i, 2i + 1) by its angle and scale it, in place; Su et al. 2021.

    Args:
        head: [2 * pairs] float32.
        cos_sin: [pairs, 2] float32.
    """
    values, angles = floats(head), floats(cos_sin)
    for i in range(pairs):
        a, b = values[2 * i], values[2 * i + 1]
        cosine, sine = angles[2 * i], angles[2 * i + 1]
        values[2 * i] = (a * cosine - b * sine) * scale
        values[2 * i + 1] = (a * sine + b * cosine) * scale


@compiled
def accumulate(scores: int, count: int, state: int, sums: int, dim: int) -> None:
    """Online softmax: add one block's scores of a row; the scores become exponentials in place.

    Source: Milakov and Gimelshein 2018, algorithm 3.

    Args:
        scores: [count] float32.
        state: [2] float32: the row's maximum and sum of exponentials so far.
        sums: [dim] float32: the row's weighted values so far, rescaled to the new maximum.
    """
    row, weighted = floats(state), floats(sums)
    top = maximum(scores, count, row[0])
    base = top if top > _MINUS_INFINITY else float32(0.0)
    rescale = exponential(row[0] - base)
    row[0] = top
    row[1] = row[1] * rescale + exponentials(scores, count, base)
    if rescale != float32(1.0):
        for i in range(dim):
            weighted[i] *= rescale


@ordering
def maximum(scores: int, count: int, least: float32) -> float32:
    """The largest of `count` scores and `least`."""
    values, top = floats(scores), least
    for i in range(count):
        top = values[i] if values[i] > top else top
    return top


@summing
def exponentials(scores: int, count: int, base: float32) -> float32:
    """Replace each score by e^(score - base), and return the sum."""
    values, total = floats(scores), float32(0.0)
    for i in range(count):
        weight = exponential(values[i] - base)
        values[i] = weight
        total += weight
    return total
