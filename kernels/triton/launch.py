"""The one way by which Triton kernels reach a device, watched: for rehearsals without a device.

Every launch of any Triton kernel, `kernel[grid](...)`, goes through `KernelInterface.__getitem__`.
While `recorded` is on, that method is this module's: it checks the arguments, reports the launch,
and runs nothing if tensors stand for others (torch's fake tensors). So no kernel can pass by.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import KernelInterface

GRID_LIMITS = (2**31 - 1, 2**16 - 1, 2**16 - 1)
"""Programs of a launch along x, y and z, at most. Source: CUDA C++ Programming Guide, table of
compute capabilities."""


class LaunchError(ValueError):
    """A launch that a device would refuse, or that would read another device's memory."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a kernel."""

    kernel: str
    grid: tuple[int, ...]
    tensors: tuple[tuple[str, Tensor], ...]
    """Name of the kernel's argument, and the tensor."""


@contextmanager
def recorded(report: Callable[[Launch], None]) -> Iterator[None]:
    """Check and report all launches of all threads; with fake tensors, run none.

    Raises:
        LaunchError: in the launcher, naming kernel and argument.
    """
    plain = KernelInterface.__getitem__

    def watched(kernel: Any, grid: Any) -> Callable[..., Any]:
        def start(*args: Any, **options: Any) -> Any:
            made = describe(kernel, grid, args, options)
            report(made)
            if is_fake():
                return None
            return plain(kernel, grid)(*args, **options)

        return start

    KernelInterface.__getitem__ = watched
    try:
        yield
    finally:
        KernelInterface.__getitem__ = plain


def describe(kernel: Any, grid: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> Launch:
    """The launch that `kernel[grid](*args, **options)` is.

    Raises:
        LaunchError: the grid is beyond the device's limits, an argument is missing, or tensors are
            on several devices or on the host.
    """
    parameters = inspect.signature(kernel.fn).parameters
    name = kernel.fn.__name__
    bound = dict(zip(parameters, args, strict=False)) | {
        key: value for key, value in options.items() if key in parameters
    }
    missing = [
        key
        for key, parameter in parameters.items()
        if key not in bound and parameter.default is inspect.Parameter.empty
    ]
    if missing:
        raise LaunchError(f"{name}: no value for {', '.join(missing)}")
    sizes = tuple(grid(bound) if callable(grid) else grid)
    if not 1 <= len(sizes) <= len(GRID_LIMITS) or not all(
        1 <= size <= limit for size, limit in zip(sizes, GRID_LIMITS, strict=False)
    ):
        raise LaunchError(f"{name}: grid {sizes} must be 1 to {GRID_LIMITS} programs")
    tensors = tuple((key, value) for key, value in bound.items() if isinstance(value, Tensor))
    devices = {str(tensor.device) for _, tensor in tensors}
    if len(devices) > 1:
        places = ", ".join(f"{key} on {tensor.device}" for key, tensor in tensors)
        raise LaunchError(f"{name}: all tensors must be on one device: {places}")
    return Launch(name, sizes, tensors)


def is_fake() -> bool:
    """Whether this thread's new tensors are fake: they have shapes and no memory."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
