"""What Python has no word for: addresses, atomic counters, bits of a float, waiting.

Addresses are int64. Whoever passes one answers for the memory behind it.
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

I8, I32, I64, F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
POINTER = ir.PointerType()


def compiled(function: _F) -> _F:
    """Part of a kernel: compiled into whoever calls it, with every sum in the order written."""
    return cast("_F", numba.njit(function, nogil=True, error_model="numpy", inline="never"))


def summing(function: _F) -> _F:
    """The same, but its sums run in vectors: in an order that their lengths decide."""
    flags = {"reassoc", "contract", "nsz"}
    return cast("_F", numba.njit(function, nogil=True, error_model="numpy", fastmath=flags))


def ordering(function: _F) -> _F:
    """The same for largest values: operands that are not numbers may be passed over."""
    flags = {"nnan", "nsz", "reassoc"}
    return cast("_F", numba.njit(function, nogil=True, error_model="numpy", fastmath=flags))


def entry(signature: Any) -> Callable[[_F], _F]:
    """A kernel that Python calls: compiled when it is imported, kept in the cache."""

    def decorate(function: _F) -> _F:
        def make(keep: bool) -> _F:
            made = numba.njit(signature, nogil=True, error_model="numpy", cache=keep)
            return cast("_F", made(function))

        return cache.with_cache(_CACHE, make)

    return decorate


def operation(build: Callable[..., Any], result: Any, *operands: Any) -> Any:
    """Something for kernels to call, emitted by `build(builder, *operands)`."""

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
"""The float32 values from an address on, by index; nothing is checked."""
ints = _view(types.int64, I64)
words = _view(types.int32, I32)
signed_bytes = _view(types.int8, I8)


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
"""(address, by) -> what the int64 there was before; atomic."""
load = operation(_load, types.int64, types.int64)
"""The int64 at an address, with all that was written before it was."""
pause = operation(_pause, types.void)
"""Tells the processor that this thread waits in a loop."""
nearest = operation(_nearest, types.float32, types.float32)
"""The nearest whole number, of two equally near ones the even."""
as_float = operation(_bits, types.float32, types.int32)
"""A float32 of those bits."""


def _library(name: str, result: Any, *operands: Any) -> Any:
    """A function of the C library."""
    return cast("Any", types.ExternalFunction(name, result(*operands)))


sem_wait = _library("sem_wait", types.int32, types.int64)
sem_post = _library("sem_post", types.int32, types.int64)
give_way = _library("sched_yield", types.int32)
