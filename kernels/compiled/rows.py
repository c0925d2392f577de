"""What is done to whole rows between the products: norms, rotation, activations, levels of int8.

Addresses and sizes are int64. A row's result depends on that row alone.
"""

import math

from numpy import float32, int32

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
_LEVELS = float32(127.0)
_TINY = float32(1e-30)
_NOTHING = float32(-math.inf)


@compiled
def exponential(x: float32) -> float32:
    """e^x within 3 units in the last place; 0 below -87."""
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
def quantise(x: int, count: int, out: int, scale: int, correction: int) -> None:
    """out = x in steps of its largest value / 127; the correction is 128 times their sum."""
    values, levels = floats(x), signed_bytes(out)
    step = largest(x, count) / _LEVELS
    step = step if step > _TINY or step != step else _TINY
    total = int32(0)
    for i in range(count):
        level = int32(nearest(values[i] / step))
        levels[i] = level
        total += level
    floats(scale)[0] = step
    words(correction)[0] = total * int32(128)


@compiled
def largest(x: int, count: int) -> float32:
    """The largest absolute value; not a number if any is not. Floats without a sign are ordered
    as their bits are."""
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
def rotate(head: int, turns: int, pairs: int, scale: float32) -> None:
    """Turn pairs of neighbours by the angle of each, and scale; Su et al. 2021."""
    values, by = floats(head), floats(turns)
    for i in range(pairs):
        a, b = values[2 * i], values[2 * i + 1]
        cosine, sine = by[2 * i], by[2 * i + 1]
        values[2 * i] = (a * cosine - b * sine) * scale
        values[2 * i + 1] = (a * sine + b * cosine) * scale


@compiled
def soften(scores: int, count: int, state: int, sums: int, dim: int) -> None:
    """One row's scores become weights, next to those of earlier blocks (Milakov and
    Gimelshein 2018).

    Args:
        state: the row's largest score and total weight so far.
        sums: [dim] weighted values so far; scaled to the new largest score.
    """
    own, done = floats(state), floats(sums)
    top = highest(scores, count, own[0])
    base = top if top > _NOTHING else float32(0.0)
    shrink = exponential(own[0] - base)
    own[0] = top
    own[1] = own[1] * shrink + weigh(scores, count, base)
    if shrink != float32(1.0):
        for i in range(dim):
            done[i] *= shrink


@ordering
def highest(scores: int, count: int, least: float32) -> float32:
    """The largest of the scores and `least`."""
    values, top = floats(scores), least
    for i in range(count):
        top = values[i] if values[i] > top else top
    return top


@summing
def weigh(scores: int, count: int, base: float32) -> float32:
    """Each score becomes e^(score - base); returns their sum."""
    values, total = floats(scores), float32(0.0)
    for i in range(count):
        weight = exponential(values[i] - base)
        values[i] = weight
        total += weight
    return total
