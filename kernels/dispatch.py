"""One name for each operation; which code runs it is decided here, once, when a model loads.

A set is a module with a constant `KERNELS`. It is imported when it is chosen, so that a machine
without a GPU never imports what only a GPU can run.
"""

import importlib
from collections.abc import Mapping

import torch

from kernels.interface import Kernels, UnsupportedError

SETS: Mapping[str, str] = {
    "reference": "kernels.reference",
    "torch": "kernels.torch",
    "torch-int8": "kernels.torch.int8",
    "torch-tiled": "kernels.torch.tiled",
    "jit": "kernels.compiled",
    "jit-int8": "kernels.compiled.int8",
    "triton": "kernels.triton.kernel_set",
}


_SHORTEST = 4


def choose(device: str, *, dtype: str = "float32", deterministic: bool = False) -> str:
    """Name of the set that serves a device ("cpu", "cuda") in a number format.

    Raises:
        UnsupportedError: naming the key that cannot be met.
    """
    if device not in ("cpu", "cuda"):
        raise UnsupportedError(f"device={device}: there are no kernels for it")
    if dtype == "int8" and device != "cpu":
        raise UnsupportedError(f"dtype=int8: there are kernels for device=cpu only, not {device}")
    if deterministic and (device, dtype) != ("cpu", "float32"):
        raise UnsupportedError(
            f"deterministic=true: there are kernels for device=cpu and dtype=float32 only, "
            f"not for {device} and {dtype}"
        )
    if device == "cuda":
        return "triton"
    if dtype == "int8":
        return "torch-int8"
    return "torch-tiled" if deterministic else "torch"


def compiled_set(device: str, dtype: str, sizes: tuple[int, ...]) -> str:
    """Name of the set that runs a round of a dense model as one compiled job; "" for none.

    Args:
        sizes: what its narrowest vectors must divide: head size and positions of a block.
    """
    if device != "cpu" or dtype not in ("float32", "int8"):
        return ""
    found = importlib.import_module("kernels.compiled.machine")
    if not found.usable() or any(size % _SHORTEST for size in sizes):
        return ""
    if dtype == "int8":
        return "jit-int8" if found.machine().byte_products else ""
    return "jit"


def load(name: str) -> Kernels:
    """The set of a name.

    Raises:
        UnsupportedError: naming those that exist.
    """
    if name not in SETS:
        raise UnsupportedError(f"no kernels {name!r}; there are {', '.join(sorted(SETS))}")
    kernels: Kernels = importlib.import_module(SETS[name]).KERNELS
    return kernels


def has_device(device: str) -> bool:
    """Whether torch can use it here."""
    return device == "cpu" or (device == "cuda" and torch.cuda.is_available())
