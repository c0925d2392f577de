"""Chooses a kernel set when a model loads, and loads sets by name.

A set is a module with a constant `KERNELS`. It is imported when it is chosen, so a machine without
a GPU never imports Triton, and a machine without numba never imports the compiled set.
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
    "jit-int8-kv16": "kernels.compiled.int8_short_cache",
    "jit-bf16-kv16": "kernels.compiled.bfloat16",
    "triton": "kernels.triton.kernel_set",
    "triton-tiled": "kernels.triton.tiled",
}
"""Module of each set, by the set's name."""

_COMPILED: Mapping[tuple[str, str, str], str] = {
    ("cpu", "float32", "auto"): "jit",
    ("cpu", "int8", "auto"): "jit-int8",
    ("cpu", "int8", "bfloat16"): "jit-int8-kv16",
    ("cpu", "bfloat16", "auto"): "jit-bf16-kv16",
    ("cpu", "bfloat16", "bfloat16"): "jit-bf16-kv16",
}
"""Sets that run whole rounds, by device, number format, and that of keys and values. Their modules
have a function `usable(sizes)`."""


def choose(device: str, *, dtype: str = "float32", deterministic: bool = False) -> str:
    """Name of the set that a model calls layer by layer.

    Args:
        device: "cpu" or "cuda".
        dtype: "float32", "bfloat16", "float16" or "int8".
        deterministic: results of a row must not depend on other rows.

    Raises:
        UnsupportedError: no set supports the combination; the message names the option.
    """
    if device not in ("cpu", "cuda"):
        raise UnsupportedError(f"device={device}: no kernel set supports it; use cpu or cuda")
    if dtype == "int8" and device != "cpu":
        raise UnsupportedError(f"dtype=int8: supported on device=cpu only, not on {device}")
    if deterministic and (device, dtype) != ("cpu", "float32"):
        raise UnsupportedError(
            "deterministic=true: supported with device=cpu and dtype=float32 only, "
            f"not with {device} and {dtype}"
        )
    if device == "cuda":
        return "triton"
    if dtype == "int8":
        return "torch-int8"
    return "torch-tiled" if deterministic else "torch"


def compiled_set(
    device: str, dtype: str, sizes: tuple[int, ...], kv_dtype: str = "auto"
) -> str | None:
    """Name of the set that runs whole rounds here; None if there is none.

    Args:
        sizes: widths of the model's narrowest products, in elements: head size and block size.
        kv_dtype: number format of keys and values; "auto" is the one that goes with `dtype`.
    """
    name = _COMPILED.get((device, dtype, kv_dtype))
    if name is None:
        return None
    return name if importlib.import_module(SETS[name]).usable(sizes) else None


def load(name: str) -> Kernels:
    """Import the set of this name.

    Raises:
        UnsupportedError: there is no such set; the message lists the known names.
    """
    if name not in SETS:
        raise UnsupportedError(
            f"no kernel set is named {name!r}; the sets are {', '.join(sorted(SETS))}"
        )
    kernels: Kernels = importlib.import_module(SETS[name]).KERNELS
    return kernels


def has_device(device: str) -> bool:
    """Whether torch can use the device on this machine."""
    return device == "cpu" or (device == "cuda" and torch.cuda.is_available())
