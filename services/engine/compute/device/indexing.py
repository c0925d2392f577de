"""Indexing and copies of tensors on a GPU that is not there.

`x[...]`, `x.copy_`, `x.contiguous()`, `~x` and a few others select the tensor's device first, which
torch's builds for CPUs cannot. This mode replaces them by the operators that they are, which a
rehearsal sees like all others.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_ATEN = torch.ops.aten
_PLAIN = {
    Tensor.__invert__: _ATEN.bitwise_not.default,
    Tensor.contiguous: _ATEN.contiguous.default,
    Tensor.nonzero: _ATEN.nonzero.default,
    Tensor.__int__: _ATEN._local_scalar_dense.default,
    Tensor.__index__: _ATEN._local_scalar_dense.default,
    Tensor.__float__: _ATEN._local_scalar_dense.default,
}


class Indexing(TorchFunctionMode):
    """Replaces methods of tensors by operators."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__getitem__:
            return _get(*args)
        if func is Tensor.__setitem__:
            return _set(*args)
        if func is Tensor.copy_:
            return _copy(*args)
        if func in _PLAIN:
            return _PLAIN[func](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _get(x: Tensor, index: Any) -> Tensor:
    view, tensors = _view(x, index)
    return _ATEN.index.Tensor(view, tensors) if tensors else view


def _set(x: Tensor, index: Any, value: Any) -> None:
    view, tensors = _view(x, index)
    if tensors:
        given = value if isinstance(value, Tensor) else view.new_full((), value)
        _ATEN.index_put_.default(view, tensors, given)
    elif isinstance(value, Tensor):
        _copy(view, value)
    else:
        view.fill_(value)


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        copied: Tensor = _ATEN.copy_.default(target, source, non_blocking)
        return copied


def _view(x: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """The part of x that numbers, slices and None select, and the tensors that index it further."""
    parts = index if isinstance(index, tuple) else (index,)
    left = x.dim() - sum(part is not None and part is not Ellipsis for part in parts)
    tensors: list[Tensor | None] = []
    dim = 0
    for part in parts:
        if part is Ellipsis:
            dim += left
        elif part is None:
            x = _ATEN.unsqueeze.default(x, dim)
            dim += 1
        elif isinstance(part, slice):
            x = _ATEN.slice.Tensor(x, dim, part.start, part.stop, part.step or 1)
            dim += 1
        elif isinstance(part, Tensor):
            tensors += [None] * (dim - len(tensors)) + [part]
            dim += 1
        else:
            x = _ATEN.select.int(x, dim, int(part))
    return x, tensors
