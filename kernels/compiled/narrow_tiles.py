"""Products with weights of 8 and 16 bits; as in `tiles`, sums stay in vector registers.

The last operand of a tile is an address: for each line of weights that it reads, it loads one from
there into the caches. The sum of a row does not depend on the rows beside it. Sums of int8 are
exact in any order; sums of bfloat16 are those of the float32 product with the same values, to the
bit.
"""

from typing import Any

from llvmlite import ir
from numba import types

from kernels.compiled.machine import PANEL_VECTORS, machine
from kernels.compiled.primitives import F32, I8, I16, I32, I64, operation
from kernels.compiled.tiles import HALF_BITS, LANES, ROWS, Emitter, by_rows

_HIGH_HALF = 0xFFFF0000
_EVEN_BYTES = 0x00FF00FF
_BYTE_BITS = 8


def _half_tile(vectors: int, lanes: int, most: int) -> Any:
    """Make a bfloat16 product: c = or += a times b.

    A word holds the values of two adjacent k, the even one in its low half. So one load and two
    operations make two vectors of float32.

    Operands: rows; a [rows, k] float32, bytes per row of a; b [k / 2, vectors * lanes, 2] bfloat16;
    k / 2; c [rows, vectors * lanes] float32, bytes per row of c; mode; where to load ahead from.
    """

    def build(builder: ir.IRBuilder, rows: int, *given: ir.Value) -> None:
        a, row_a, b, k, c, row_c, mode, ahead = given
        e = Emitter(builder, lanes)
        starts = [builder.add(a, builder.mul(row_a, I64(r))) for r in range(rows)]
        shift = ir.Constant(e.ints, [I32(HALF_BITS)] * lanes)
        high = ir.Constant(e.ints, [I32(_HIGH_HALF)] * lanes)

        def step(index: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            line = builder.mul(index, I64(4 * lanes * vectors))
            e.fetch(ahead, line, 4 * lanes * vectors)
            words = [
                e.read(e.at(b, builder.add(line, I64(4 * lanes * v))), e.ints)
                for v in range(vectors)
            ]
            place = builder.mul(index, I64(8))
            for half in range(2):
                weights = [
                    builder.bitcast(
                        builder.and_(word, high) if half else builder.shl(word, shift), e.floats
                    )
                    for word in words
                ]
                at = builder.add(place, I64(4 * half))
                factors = [e.spread(e.read(e.at(s, at), F32), e.floats) for s in starts]
                sums = [
                    e.fused(factors[i // vectors], weights[i % vectors], total)
                    for i, total in enumerate(sums)
                ]
            return sums

        zero = ir.Constant(e.floats, [F32(0.0)] * lanes)
        sums = e.loop(k, [zero] * (rows * vectors), step)
        _put(e, sums, vectors, c, row_c, mode)

    return by_rows(build, most, 8)


def _byte_tile(vectors: int, lanes: int, most: int) -> Any:
    """Make an int8 product: c = or += row scale * column scale * (a times (b - 128)).

    Operands: rows; a [rows, k] int8, bytes per row of a; row scales [rows] float32; corrections
    [rows] int32, 128 times the sum of each row of a; b [k / 4, vectors * lanes, 4] uint8; column
    scales [vectors * lanes] float32; k / 4; c [rows, vectors * lanes] float32, bytes per row of c;
    mode; where to load ahead from.
    """

    def build(builder: ir.IRBuilder, rows: int, *given: ir.Value) -> None:
        a, row_a, scales, corrections, b, scales_b, k, c, row_c, mode, ahead = given
        e = Emitter(builder, lanes)
        starts = [builder.add(a, builder.mul(row_a, I64(r))) for r in range(rows)]
        add_products = _add_quads if machine().byte_products else _add_pairs

        def step(index: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            line = builder.mul(index, I64(4 * lanes * vectors))
            e.fetch(ahead, line, 4 * lanes * vectors)
            weights = [
                e.read(e.at(b, builder.add(line, I64(4 * lanes * v))), e.ints)
                for v in range(vectors)
            ]
            place = builder.mul(index, I64(4))
            fours = [e.spread(e.read(e.at(s, place), I32), e.ints) for s in starts]
            return add_products(e, sums, weights, fours)

        zero = ir.Constant(e.ints, [I32(0)] * lanes)
        sums = e.loop(k, [zero] * (rows * vectors), step)
        columns = [e.read(e.at(scales_b, 4 * lanes * v), e.floats) for v in range(vectors)]
        made = []
        for r in range(rows):
            correction = e.spread(e.read(e.at(corrections, 4 * r), I32), e.ints)
            scale = e.spread(e.read(e.at(scales, 4 * r), F32), e.floats)
            for v in range(vectors):
                whole = builder.sub(sums[r * vectors + v], correction)
                value = builder.fmul(builder.sitofp(whole, e.floats), columns[v])
                made.append(builder.fmul(value, scale))
        _put(e, made, vectors, c, row_c, mode)

    return by_rows(build, most, 11)


def _put(
    e: Emitter, made: list[ir.Value], vectors: int, c: ir.Value, row_c: ir.Value, mode: ir.Value
) -> None:
    """Store or add the sums of a tile, row by row."""
    targets = []
    for i, value in enumerate(made):
        row = e.b.add(c, e.b.mul(row_c, I64(i // vectors)))
        targets.append((value, e.at(row, 4 * e.lanes * (i % vectors))))
    e.put(targets, mode)


def _add_quads(
    e: Emitter, sums: list[ir.Value], weights: list[ir.Value], fours: list[ir.Value]
) -> list[ir.Value]:
    """Add four products to each sum, with AVX-512 VNNI."""
    bytes_of = ir.VectorType(I8, 4 * e.lanes)
    left = [e.b.bitcast(weight, bytes_of) for weight in weights]
    right = [e.b.bitcast(four, bytes_of) for four in fours]
    count = len(weights)
    return [
        e.call("llvm.x86.avx512.vpdpbusd.512", e.ints, total, left[i % count], right[i // count])
        for i, total in enumerate(sums)
    ]


def _add_pairs(
    e: Emitter, sums: list[ir.Value], weights: list[ir.Value], fours: list[ir.Value]
) -> list[ir.Value]:
    """Add four products to each sum, with AVX2: those of the even bytes, then of the odd ones.

    Bytes are widened to 16 bits first, so no sum saturates. The result equals that of `_add_quads`.
    """
    b, lanes = e.b, e.lanes
    pairs = ir.VectorType(I16, 2 * lanes)
    byte = ir.Constant(pairs, [I16(_BYTE_BITS)] * (2 * lanes))
    low = ir.Constant(e.ints, [I32(_EVEN_BYTES)] * lanes)
    count = len(weights)
    for odd in range(2):
        if odd:
            left = [b.lshr(b.bitcast(weight, pairs), byte) for weight in weights]
            right = [b.ashr(b.bitcast(four, pairs), byte) for four in fours]
        else:
            left = [b.bitcast(b.and_(weight, low), pairs) for weight in weights]
            right = [b.ashr(b.shl(b.bitcast(four, pairs), byte), byte) for four in fours]
        made = [
            e.call("llvm.x86.avx2.pmadd.wd", e.ints, left[i % count], right[i // count])
            for i in range(len(sums))
        ]
        sums = [b.add(total, more) for total, more in zip(sums, made, strict=True)]
    return sums


half_panel = _half_tile(PANEL_VECTORS, LANES, ROWS)
"""Product with a panel of a bfloat16 weight."""
byte_panel = (
    _byte_tile(PANEL_VECTORS, LANES, ROWS)
    if machine().byte_products or machine().byte_pairs
    else operation(lambda *_: None, types.void, *[types.int64] * 12)
)
"""Product with a panel of an int8 weight.

On a machine with neither kind of byte products it is empty and never called: LLVM would abort the
process over an instruction that does not exist there."""
