"""Ragged batches with rubbish wherever no kernel may look, and bounds of rounding errors."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from kernels.ragged import RaggedBatch

UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11}
"""Largest relative error of one rounding to nearest; denormal numbers do not occur. For bfloat16
that of cutting off, which is what Triton's interpreter does."""


def make_batch(
    parts: Sequence[tuple[int, int]], block: int, *, decodes: int = 0, spare: int = 2
) -> tuple[RaggedBatch, int]:
    """A batch of (positions before the round, rows), and the number of blocks in its cache.

    Blocks are scattered; lines of the table end in the number of a block that does not exist.
    """
    lengths = [before + rows for before, rows in parts]
    counts = [-(-length // block) for length in lengths]
    total = 1 + sum(counts)
    ids = (torch.randperm(total - 1) + 1).tolist()
    tables = torch.full((len(parts), max(counts, default=0) + spare), 1 << 20, dtype=torch.int32)
    for line, count in zip(tables, counts, strict=True):
        line[:count] = torch.tensor([ids.pop() for _ in range(count)], dtype=torch.int32)
    starts = torch.tensor([0, *(rows for _, rows in parts)]).cumsum(0).int()
    most = max((rows for _, rows in parts), default=1)
    batch = RaggedBatch(
        starts, torch.tensor(lengths).int(), tables, max(most, 1), max(lengths, default=0), decodes
    )
    return batch, total


def used_slots(batch: RaggedBatch, block: int, *, window: int = 0) -> Tensor:
    """Flat slots of all positions that some row attends to."""
    slots = []
    rows = batch.query_starts.diff().tolist()
    for line, length, count in zip(batch.block_tables, batch.lengths.tolist(), rows, strict=True):
        first = max(0, length - count + 1 - window) if window else 0
        places = torch.arange(first, length) if count else torch.arange(0)
        slots.append(line.long()[places // block] * block + places % block)
    return torch.cat(slots) if slots else torch.empty(0, dtype=torch.long)


def make_cache(blocks: int, block: int, inner: tuple[int, ...], used: Tensor, dtype) -> Tensor:
    """Random where used, NaN elsewhere: [blocks, block, *inner]."""
    cache = torch.full((blocks * block, *inner), math.nan)
    cache[used] = torch.randn(len(used), *inner)
    return cache.to(dtype).view(blocks, block, *inner)


def bound(q: Tensor, keys: Tensor, values: Tensor, scale: float, extra: float = 0.0) -> float:
    """Largest difference of two computations of softmax(scale q k^T) v, each summed in float32.

    With u the unit of float32: a score of D terms is off by (D + 2) u times the product of the
    norms, and by `extra`. A weight is off by twice that, relatively, and by some units of exp and
    of sums over N positions. A weight is then rounded to the format of the values, and so is the
    result. Both sides may err so (Higham 2002, section 3.1).
    """
    keys, values = keys[~keys.isnan()], values[~values.isnan()].float().abs()
    u, width = UNIT[torch.float32], q.shape[-1]
    norms = q.float().norm(dim=-1).max() * keys.float().view(-1, width).norm(dim=-1).max()
    score = float(norms) * scale * (width + 2) * u + extra
    positions = len(keys) // width
    relative = 2 * score + (positions + 16) * u + UNIT[q.dtype]
    return 2 * float(values.max()) * (relative + UNIT[q.dtype])


def multiply_row_by_row(builder, a, b, d, input_precision, max_num_imprecise_acc):
    """A product whose rows do not depend on one another, as on tensor cores; NumPy's BLAS adds the
    terms of a row in an order that depends on where the row is."""
    product = (a.data[:, :, None] * b.data[None]).sum(1, dtype=d.data.dtype)
    return TensorHandle(product + d.data, d.dtype.scalar)


def use_plain_products(monkeypatch) -> None:
    """Let the interpreter multiply row by row."""
    monkeypatch.setattr(InterpreterBuilder, "create_dot", multiply_row_by_row)


def poison(monkeypatch) -> None:
    """Memory that kernels forget to write is NaN."""
    real = torch.empty

    def empty(*args, **kwargs):
        made = real(*args, **kwargs)
        return made.fill_(math.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, math.nan))
