"""Operations that Python cannot express: memory by address, atomics, bits of a float, waiting.

Addresses are int64. Nothing is checked: the caller must keep the memory alive and in bounds.
"""

from collections.abc import Callable
from inspect import Parameter, Signature
from typing import Any, TypeVar, cast

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kernels.compiled import cache

_CACHE = cache.folder()
if _CACHE:
    cast("Any", numba.config).CACHE_DIR = _CACHE

_F = TypeVar("_F", bound=Callable[..., Any])

I8, I16, I32, I64 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64)
F32 = ir.FloatType()
POINTER = ir.PointerType()


def compiled(function: _F) -> _F:
    """Compile a function of a kernel into its callers; every sum keeps the order written."""
    return cast("_F", numba.njit(function, nogil=True, error_model="numpy", inline="never"))


def summing(function: _F) -> _F:
    """As `compiled`, but sums may use vectors: their order then depends on their length only."""
    flags = {"reassoc", "contract", "nsz"}
    return cast("_F", numba.njit(function, nogil=True, error_model="numpy", fastmath=flags))


def ordering(function: _F) -> _F:
    """As `compiled`, for maxima: they may use vectors and may ignore NaN."""
    flags = {"nnan", "nsz", "reassoc"}
    return cast("_F", numba.njit(function, nogil=True, error_model="numpy", fastmath=flags))


def entry(signature: Any) -> Callable[[_F], _F]:
    """Make a kernel that Python calls: compiled when it is imported, and cached on disk."""

    def decorate(function: _F) -> _F:
        def make(keep: bool) -> _F:
            made = numba.njit(signature, nogil=True, error_model="numpy", cache=keep)
            return cast("_F", made(function))

        return cache.with_cache(_CACHE, make)

    return decorate


def operation(build: Callable[..., Any], result: Any, *operands: Any) -> Any:
    """Make a function for kernels to call, from the LLVM instructions that `build` emits.

    Args:
        build: called with the LLVM builder and the operands' values; returns the result or None.
        result: numba type of the result.
        operands: numba types of the operands.
    """

    def typed(_typing: Any, *_given: Any) -> Any:
        def emit(context: Any, builder: ir.IRBuilder, _signature: Any, values: Any) -> Any:
            made = build(builder, *values)
            return context.get_dummy_value() if made is None else made

        return result(*operands), emit

    names = ["typing", *(f"operand_{place}" for place in range(len(operands)))]
    cast("Any", typed).__signature__ = Signature(
        [Parameter(n, Parameter.POSITIONAL_OR_KEYWORD) for n in names]
    )
    return intrinsic(typed)


def _pointer(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.inttoptr(address, POINTER)


def _view(kind: Any, element: ir.Type) -> Any:
    def build(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
        return builder.inttoptr(address, ir.PointerType(element))

    return operation(build, cast("Any", types).CPointer(kind), types.int64)


floats = _view(types.float32, F32)
"""The float32 values at an address, by index."""
ints = _view(types.int64, I64)
"""The int64 values at an address, by index."""
words = _view(types.int32, I32)
"""The int32 values at an address, by index."""
halves = _view(types.uint16, I16)
"""The 16-bit words at an address, by index: the bits of bfloat16 values."""
signed_bytes = _view(types.int8, I8)
"""The int8 values at an address, by index."""


def _fetch_add(builder: ir.IRBuilder, address: ir.Value, by: ir.Value) -> ir.Value:
    return builder.atomic_rmw("add", _pointer(builder, address), by, "seq_cst")


def _load(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.load_atomic(_pointer(builder, address), "acquire", 8, typ=I64)


def _pause(builder: ir.IRBuilder) -> None:
    module = builder.module
    name = "llvm.x86.sse2.pause"
    callee = module.globals.get(name) or ir.Function(
        module, ir.FunctionType(ir.VoidType(), []), name
    )
    builder.call(callee, [])


def _nearest(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    module, name = builder.module, "llvm.rint.f32"
    callee = module.globals.get(name) or ir.Function(module, ir.FunctionType(F32, [F32]), name)
    return builder.call(callee, [value])


def _bits(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    return builder.bitcast(value, F32)


fetch_add = operation(_fetch_add, types.int64, types.int64, types.int64)
"""(address, by) -> the int64 at the address before the addition; atomic."""
load = operation(_load, types.int64, types.int64)
"""The int64 at an address, atomic; writes made before it was stored are visible (acquire)."""
pause = operation(_pause, types.void)
"""Hint to the processor that the thread waits in a loop."""
nearest = operation(_nearest, types.float32, types.float32)
"""The nearest whole number; a tie goes to the even one."""
as_float = operation(_bits, types.float32, types.int32)
"""The float32 with the bits of an int32."""


def _library(name: str, result: Any, *operands: Any) -> Any:
    """Declare a function of the C library."""
    return cast("Any", types.ExternalFunction(name, result(*operands)))


sem_wait = _library("sem_wait", types.int32, types.int64)
sem_post = _library("sem_post", types.int32, types.int64)
yield_core = _library("sched_yield", types.int32)
