"""The sum over the depth of one tile: rows of x times rows of a weight, in float32.

Steps of DEPTH_TILE in a fixed order: the sums of a row depend on the tile's sizes alone, not on the
other rows. Weights in 8 or 4 bits are decoded in registers (formats: codes.py). Every decoded
number, without its scale, is exact in bfloat16, so only sums are rounded: the scale of a group is
applied to the sum over the group, in float32. Scales of MXFP4 are powers of two and exact as well.
"""

import triton
import triton.language as tl

PLAIN, FLOAT8, FLOAT4, INT8, INT4 = (tl.constexpr(number) for number in range(5))


@triton.constexpr_function
def is_packed(form):
    """Whether a byte of the format holds two numbers."""
    return form in (FLOAT4.value, INT4.value)


@triton.constexpr_function
def has_scale_of_sum(form):
    """Whether a scale multiplies the sum of a group: not for plain weights and powers of two."""
    return form not in (PLAIN.value, FLOAT4.value)


@triton.jit
def _float8(raw):
    """e4m3 as float32: its exponent and mantissa are float32's, but for a bias of 127 - 7."""
    raw = raw.to(tl.int32)
    bits = ((raw & 0x80) << 24) | ((raw & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120


@triton.jit
def _float4(raw):
    """e2m1 in the lower 4 bits as float32."""
    raw = raw.to(tl.int32)
    bits = ((raw & 8) << 28) | ((raw & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126


@triton.jit
def _power_of_two(raw):
    """e8m0 as float32: 2**(raw - 127)."""
    raw = raw.to(tl.int32)
    bits = tl.where(raw == 0, 0x400000, raw << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _pairs(low, high):
    """[N, K / 2] twice -> [K, N]: numbers of even and of odd places of the depth."""
    return tl.trans(tl.interleave(low, high))


@triton.jit
def weight_tile(
    weight, scales, zeros, column, inside, start,
    DEPTH: tl.constexpr, DEPTH_TILE: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """[DEPTH_TILE, columns] of a weight [columns, DEPTH], without the scales of its groups.

    Args:
        weight, scales, zeros: pointers to the matrix and to what belongs to it.
        column: rows of the matrix; `inside` says which exist.
        start: first place of the depth.
        GROUP: places of the depth that share a scale.
    """
    if not is_packed(FORMAT):
        at = start + tl.arange(0, DEPTH_TILE)
        where = weight + column[None, :] * DEPTH + at[:, None]
        if DEPTH % DEPTH_TILE == 0:
            raw = tl.load(where, mask=inside[None, :], other=0)
        else:
            raw = tl.load(where, mask=inside[None, :] & (at < DEPTH)[:, None], other=0)
    else:
        byte = start // 2 + tl.arange(0, DEPTH_TILE // 2)
        there = inside[:, None] & (byte < DEPTH // 2)[None, :]
        raw = tl.load(weight + column[:, None] * (DEPTH // 2) + byte[None, :], mask=there, other=0)
    GROUPS: tl.constexpr = (DEPTH + GROUP - 1) // GROUP
    if FORMAT == FLOAT8:
        raw = _float8(raw)
    elif FORMAT == FLOAT4:
        where = scales + column[:, None] * GROUPS + (byte // (GROUP // 2))[None, :]
        scale = _power_of_two(tl.load(where, mask=there, other=127))
        raw = _pairs(_float4(raw & 15) * scale, _float4(raw >> 4) * scale)
    elif FORMAT == INT8:
        zero = tl.load(zeros + column * GROUPS + start // GROUP, mask=inside, other=0)
        raw = (raw.to(tl.int32) - zero.to(tl.int32)[None, :]).to(tl.float32)
    elif FORMAT == INT4:
        zero = tl.load(zeros + column * GROUPS + start // GROUP, mask=inside, other=0)
        code, zero = raw.to(tl.int32), zero.to(tl.int32)[:, None]
        raw = _pairs(((code & 15) - zero).to(tl.float32), ((code >> 4) - zero).to(tl.float32))
    return raw


@triton.jit
def accumulate(
    x, row_inside, weight, scales, zeros, column, column_inside,
    DEPTH: tl.constexpr, DEPTH_TILE: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr,
    WIDE: tl.constexpr, ROW_TILE: tl.constexpr, COLUMN_TILE: tl.constexpr,
):  # fmt: skip
    """[ROW_TILE, COLUMN_TILE] float32: the tile's rows of x times its rows of the weight.

    Args:
        x: pointers to the first elements of rows, whose elements are adjacent.
        WIDE: see kernels.triton.interpreted.
    """
    GROUPS: tl.constexpr = (DEPTH + GROUP - 1) // GROUP
    total = tl.zeros([ROW_TILE, COLUMN_TILE], tl.float32)
    for start in range(0, DEPTH, DEPTH_TILE):
        at = start + tl.arange(0, DEPTH_TILE)
        if DEPTH % DEPTH_TILE == 0:
            a = tl.load(x[:, None] + at[None, :], mask=row_inside[:, None], other=0.0)
        else:
            there = row_inside[:, None] & (at < DEPTH)[None, :]
            a = tl.load(x[:, None] + at[None, :], mask=there, other=0.0)
        b = weight_tile(
            weight, scales, zeros, column, column_inside, start, DEPTH, DEPTH_TILE, FORMAT, GROUP
        )
        if WIDE:
            a, b = a.to(tl.float32), b.to(tl.float32)
        else:
            b = b.to(a.dtype)
        if not has_scale_of_sum(FORMAT):
            total = tl.dot(a, b, total, input_precision="ieee")
        else:
            scale = tl.load(scales + column * GROUPS + start // GROUP, mask=column_inside, other=0)
            total += tl.dot(a, b, input_precision="ieee") * scale[None, :]
    return total
