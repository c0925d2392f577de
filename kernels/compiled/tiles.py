"""float32 products of small tiles, emitted as LLVM instructions; sums stay in vector registers.

The sums of a row are added in the order of k and on their own. So a row's result does not depend on
how many rows are computed together, nor on how many columns. The right operand may be stored in
bfloat16: it becomes float32, which is exact, when it is read.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types

from kernels.compiled.machine import PANEL_VECTORS, machine
from kernels.compiled.primitives import F32, I8, I16, I32, I64, POINTER, operation

STORE, ADD = 0, 1
"""Modes of a product: overwrite the target, or add to it."""
HALF_BITS = 16
"""Bits of a bfloat16."""
_CACHE_LINE = 64
_TO_READ, _ALL_LEVELS, _DATA = 0, 3, 1
"""Arguments of LLVM's prefetch."""


Step = Callable[[ir.Value, list[ir.Value]], list[ir.Value]]


class Emitter:
    """Emits the instructions that tiles consist of."""

    def __init__(self, builder: ir.IRBuilder, lanes: int) -> None:
        self.b = builder
        self.lanes = lanes
        self.floats = ir.VectorType(F32, lanes)
        self.ints = ir.VectorType(I32, lanes)

    def at(self, address: ir.Value, offset: ir.Value | int) -> ir.Value:
        """Pointer to `address` + `offset` bytes."""
        if isinstance(offset, int):
            offset = I64(offset)
        base = self.b.inttoptr(address, POINTER)
        return self.b.gep(base, [offset], source_etype=I8)

    def read(self, pointer: ir.Value, kind: ir.Type) -> ir.Value:
        """Load a value of any alignment."""
        return self.b.load(pointer, align=4 if kind in (F32, I32) else 1, typ=kind)

    def read_halves(self, pointer: ir.Value) -> ir.Value:
        """Load bfloat16 values as float32: their bits are the high half."""
        halves = self.read(pointer, ir.VectorType(I16, self.lanes))
        shift = ir.Constant(self.ints, [I32(HALF_BITS)] * self.lanes)
        return self.b.bitcast(self.b.shl(self.b.zext(halves, self.ints), shift), self.floats)

    def fetch(self, address: ir.Value, offset: ir.Value, count: int) -> None:
        """Start to load `count` bytes from `address` + `offset` into the caches.

        A hint: it never fails, whatever the address, and changes no result.
        """
        module, name = self.b.module, "llvm.prefetch.p0"
        kind = ir.FunctionType(ir.VoidType(), [POINTER, I32, I32, I32])
        callee = module.globals.get(name) or ir.Function(module, kind, name)
        for line in range(0, count, _CACHE_LINE):
            pointer = self.at(address, self.b.add(offset, I64(line)))
            self.b.call(callee, [pointer, I32(_TO_READ), I32(_ALL_LEVELS), I32(_DATA)])

    def write(self, value: ir.Value, pointer: ir.Value) -> None:
        self.b.store(value, pointer, align=4)

    def spread(self, value: ir.Value, kind: ir.VectorType) -> ir.Value:
        """Copy one value to all lanes."""
        first = self.b.insert_element(ir.Constant(kind, ir.Undefined), value, I32(0))
        zeros = ir.Constant(ir.VectorType(I32, self.lanes), [I32(0)] * self.lanes)
        return self.b.shuffle_vector(first, ir.Constant(kind, ir.Undefined), zeros)

    def call(self, name: str, kind: ir.Type, *operands: ir.Value) -> ir.Value:
        """Call an intrinsic of LLVM."""
        module = self.b.module
        callee = module.globals.get(name)
        if callee is None:
            made = ir.FunctionType(kind, [operand.type for operand in operands])
            callee = ir.Function(module, made, name)
        return self.b.call(callee, operands)

    def fused(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """a * b + c, rounded once."""
        return self.call(f"llvm.fma.v{self.lanes}f32", self.floats, a, b, c)

    def loop(self, count: ir.Value, initial: Sequence[ir.Value], step: Step) -> list[ir.Value]:
        """Emit a loop of `count` steps (i, values) -> values; the values stay in registers."""
        before = self.b.block
        head = self.b.append_basic_block("tile")
        after = self.b.append_basic_block("sums")
        self.b.branch(head)
        self.b.position_at_end(head)
        index = self.b.phi(I64)
        index.add_incoming(I64(0), before)
        values = [self.b.phi(value.type) for value in initial]
        for phi, value in zip(values, initial, strict=True):
            phi.add_incoming(value, before)
        made = step(index, values)
        following = self.b.add(index, I64(1))
        index.add_incoming(following, self.b.block)
        for phi, value in zip(values, made, strict=True):
            phi.add_incoming(value, self.b.block)
        self.b.cbranch(self.b.icmp_signed("<", following, count), head, after)
        self.b.position_at_end(after)
        return made

    def put(self, made: Sequence[tuple[ir.Value, ir.Value]], mode: ir.Value) -> None:
        """Store values at their pointers, or add them to the memory there, as `mode` says."""
        adds = self.b.icmp_signed("==", mode, I64(ADD))
        with self.b.if_else(adds) as (then, other):
            with then:
                for value, pointer in made:
                    self.write(self.b.fadd(self.read(pointer, self.floats), value), pointer)
            with other:
                for value, pointer in made:
                    self.write(value, pointer)


def by_rows(build_tile: Any, most: int, operands: int) -> Any:
    """Make an operation whose first operand is the number of rows of the tile, 1 to `most`."""

    def build(builder: ir.IRBuilder, rows: ir.Value, *given: ir.Value) -> None:
        done = builder.append_basic_block("done")
        choice = builder.switch(rows, done)
        for count in range(1, most + 1):
            block = builder.append_basic_block(f"rows{count}")
            choice.add_case(I64(count), block)
            builder.position_at_end(block)
            build_tile(builder, count, *given)
            builder.branch(done)
        builder.position_at_end(done)

    return operation(build, types.void, *[types.int64] * (operands + 1))


_OPERANDS = 8
"""Operands of a float32 tile, without the number of rows."""


def _float_tile(
    vectors: int, lanes: int, most: int, size: int = 4, *, fetches: bool = False
) -> Any:
    """Make a float32 product: c = a times b, or c += a times b.

    Operands: rows; a [rows, k], bytes per row of a; b [k, vectors * lanes], bytes per row of b; k;
    c [rows, vectors * lanes], bytes per row of c; mode; with `fetches` an address.

    Args:
        size: bytes of a value of b: 4 for float32, 2 for bfloat16.
        fetches: for each line of b that is read, load one from the last operand on into the caches.
    """

    def build(builder: ir.IRBuilder, rows: int, *given: ir.Value) -> None:
        a, row_a, b, row_b, k, c, row_c, mode = given[:_OPERANDS]
        e = Emitter(builder, lanes)
        cells = [(r, v) for r in range(rows) for v in range(vectors)]
        starts = [builder.add(a, builder.mul(row_a, I64(r))) for r in range(rows)]

        def step(index: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            line = builder.mul(index, row_b)
            if fetches:
                e.fetch(given[_OPERANDS], line, size * lanes * vectors)
            places = [e.at(b, builder.add(line, I64(size * lanes * v))) for v in range(vectors)]
            weights = [e.read(at, e.floats) if size == 4 else e.read_halves(at) for at in places]
            place = builder.mul(index, I64(4))
            factors = [e.spread(e.read(e.at(s, place), F32), e.floats) for s in starts]
            return [e.fused(factors[r], weights[v], sums[i]) for i, (r, v) in enumerate(cells)]

        zero = ir.Constant(e.floats, [F32(0.0)] * lanes)
        sums = e.loop(k, [zero] * len(cells), step)
        made = []
        for (r, v), value in zip(cells, sums, strict=True):
            row = builder.add(c, builder.mul(row_c, I64(r)))
            made.append((value, e.at(row, 4 * lanes * v)))
        e.put(made, mode)

    return by_rows(build, most, _OPERANDS + fetches)


LANES = machine().lanes
"""float32 values in a vector."""
ROWS = machine().rows
"""Rows of a tile, at most."""
PANEL = PANEL_VECTORS * LANES
"""Outputs of a packed panel: the columns of a tile."""
float_panel = _float_tile(PANEL_VECTORS, LANES, ROWS, fetches=True)
"""Product with a panel of a float32 weight, which loads ahead."""
float_pair = _float_tile(2, LANES, ROWS)
"""Product two vectors wide: enough sums that none waits for the one before it."""
float_line = _float_tile(1, LANES, ROWS)
"""Product one vector wide."""
SHORT = 4
"""Lanes of the narrowest tile, for widths that are not a multiple of a vector."""
float_short = _float_tile(1, SHORT, ROWS)
"""Product SHORT columns wide."""
half_pair = _float_tile(2, LANES, ROWS, 2)
"""As `float_pair`, with the right operand in bfloat16."""
half_line = _float_tile(1, LANES, ROWS, 2)
"""As `float_line`, with the right operand in bfloat16."""
