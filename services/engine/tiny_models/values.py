"""Random values from an integer hash: equal on every machine and with every version."""

import math
import zlib

import numpy as np
from numpy.typing import NDArray

from services.engine.tiny_models.declaration import Kind, TinyTensor

_CHUNK = 1 << 20
"""Values at a time, so that a large tensor needs little more than its own memory."""


def tensor_values(tensor: TinyTensor, seed: int) -> NDArray[np.float32]:
    """Values of a tensor. They depend on its name, its shape and the seed, on no other tensor.

    Rows of a matrix keep the size of what they are multiplied with; norms are near one. A table
    has whole numbers, in random order.
    """
    if tensor.kind is Kind.TABLE:
        rows, chosen = tensor.shape
        order = uniform(rows * tensor.below, _key(tensor.name, seed)).reshape(rows, tensor.below)
        return order.argsort(1, kind="stable")[:, :chosen].astype(np.float32)
    drawn = uniform(math.prod(tensor.shape), _key(tensor.name, seed)).reshape(tensor.shape)
    if tensor.kind is Kind.NORM:
        return (1 + drawn / 4).astype(np.float32)
    if tensor.kind is Kind.BIAS:
        return (drawn / 4).astype(np.float32)
    inputs = tensor.shape[-2] if tensor.kind is Kind.STACK else tensor.shape[-1]
    spread = 1.0 if "embed" in tensor.name else 3.0 / math.sqrt(inputs)
    return (spread * tensor.scale * drawn).astype(np.float32)


def uniform(count: int, key: int) -> NDArray[np.float32]:
    """Values in [-1, 1) with 24 bits, by SplitMix64 over the index."""
    values = np.empty(count, np.float32)
    for start in range(0, count, _CHUNK):
        part = values[start : start + _CHUNK]
        with np.errstate(over="ignore"):
            state = np.arange(start + 1, start + 1 + len(part), dtype=np.uint64) + np.uint64(key)
            state *= np.uint64(0x9E3779B97F4A7C15)
            state = (state ^ state >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
            state = (state ^ state >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
            state ^= state >> np.uint64(31)
        part[:] = (state >> np.uint64(40)).astype(np.float32) / np.float32(1 << 23) - 1
    return values


def _key(name: str, seed: int) -> int:
    """Where a tensor's values begin: 2**32 apart for different names, but for a chance hash."""
    return zlib.crc32(f"{seed} {name}".encode()) << 32
