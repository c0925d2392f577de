"""Residual streams of DeepSeek V4 (hyper-connections): weights, reading and spreading."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.checks import FLOATS, check

SPLIT = 2048
"""Elements of all streams that one program of the scores multiplies."""
ROWS = 16
TILE = 64
READ = 1024
"""Elements of a row that one program reads or spreads."""


@triton.jit
def stream_scores_kernel(
    streams, weight, parts, squares, rows, OUTPUTS: tl.constexpr, WIDTH: tl.constexpr,
    SPLIT: tl.constexpr, ROWS: tl.constexpr, OUT_TILE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of rows, splits of the width): products and sums of squares of one split.

    Products are in float32 throughout: the balancing that follows magnifies errors.
    """
    split = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    output = tl.arange(0, OUT_TILE)
    known = row < rows
    wide = row.to(tl.int64)
    scores = tl.zeros([ROWS, OUT_TILE], tl.float32)
    square = tl.zeros([ROWS], tl.float32)
    for start in range(split * SPLIT, tl.minimum((split + 1) * SPLIT, WIDTH), TILE):
        at = start + tl.arange(0, TILE)
        inside = at < WIDTH
        x = tl.load(
            streams + wide[:, None] * WIDTH + at[None, :],
            mask=known[:, None] & inside[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        w = tl.load(
            weight + output[:, None] * WIDTH + at[None, :],
            mask=(output[:, None] < OUTPUTS) & inside[None, :], other=0.0,
        )  # fmt: skip
        scores = tl.dot(x, tl.trans(w), acc=scores, input_precision="ieee")
        square += tl.sum(x * x, axis=1)
    line = split.to(tl.int64) * rows + wide
    where = parts + line[:, None] * OUTPUTS + output[None, :]
    tl.store(where, scores, mask=known[:, None] & (output[None, :] < OUTPUTS))
    tl.store(squares + line, square, mask=known)


@triton.jit
def _score(parts, base, scale, at, row, rows, shrink, OUTPUTS: tl.constexpr, SPLITS: tl.constexpr):
    """Scores `at` of a row, of all splits in their order."""
    total = tl.load(parts + row * OUTPUTS + at)
    for split in range(1, SPLITS):
        total += tl.load(parts + (split * rows + row) * OUTPUTS + at)
    return total * shrink * tl.load(scale + at) + tl.load(base + at)


@triton.jit
def stream_weights_kernel(
    parts, squares, base, scale, pre, post, mix, rows, norm_eps, eps,
    COUNT: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Grid (rows). The matrix is balanced by rows, then columns, STEPS times."""
    row = tl.program_id(0).to(tl.int64)
    outputs: tl.constexpr = COUNT * (2 + COUNT)
    square = tl.load(squares + row)
    for split in range(1, SPLITS):
        square += tl.load(squares + split * rows + row)
    shrink = 1.0 / tl.sqrt(square / WIDTH + norm_eps)
    one = tl.arange(0, COUNT)
    two = one[:, None] * COUNT + one[None, :]
    first = _score(parts, base, scale, one, row, rows, shrink, outputs, SPLITS)
    second = _score(parts, base, scale, COUNT + one, row, rows, shrink, outputs, SPLITS)
    tl.store(pre + row * COUNT + one, 1.0 / (1.0 + tl.exp(-first)) + eps)
    tl.store(post + row * COUNT + one, 2.0 / (1.0 + tl.exp(-second)))
    matrix = _score(parts, base, scale, 2 * COUNT + two, row, rows, shrink, outputs, SPLITS)
    matrix = tl.exp(matrix - tl.max(matrix, axis=1)[:, None])
    matrix = matrix / tl.sum(matrix, axis=1)[:, None] + eps
    matrix = matrix / (tl.sum(matrix, axis=0) + eps)[None, :]
    for _ in range(1, STEPS):
        matrix = matrix / (tl.sum(matrix, axis=1) + eps)[:, None]
        matrix = matrix / (tl.sum(matrix, axis=0) + eps)[None, :]
    tl.store(mix + row * (COUNT * COUNT) + two, matrix)


@triton.jit
def stream_read_kernel(
    streams, pre, out, COUNT: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr
):
    """Grid (rows, tiles of elements): the streams added with their weights, first to last."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < SIZE
    total = tl.zeros([TILE], tl.float32)
    for stream in tl.static_range(COUNT):
        where = streams + (row * COUNT + stream) * SIZE + at
        x = tl.load(where, mask=inside, other=0.0).to(tl.float32)
        total += x * tl.load(pre + row * COUNT + stream)
    tl.store(out + row * SIZE + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def stream_spread_kernel(
    streams, output, post, mix, out, COUNT: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr
):
    """Grid (rows, tiles of elements)."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = at < SIZE
    added = tl.load(output + row * SIZE + at, mask=inside, other=0.0).to(tl.float32)
    for target in tl.static_range(COUNT):
        total = added * tl.load(post + row * COUNT + target)
        for source in tl.static_range(COUNT):
            where = streams + (row * COUNT + source) * SIZE + at
            x = tl.load(where, mask=inside, other=0.0).to(tl.float32)
            total += x * tl.load(mix + (row * COUNT + source) * COUNT + target)
        where = out + (row * COUNT + target) * SIZE + at
        tl.store(where, total.to(out.dtype.element_ty), mask=inside)


def connect(
    streams: Tensor, weight: Tensor, base: Tensor, scale: Tensor, *, norm_eps: float,
    eps: float, steps: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See kernels.reference.v4.connect; all tensors are contiguous, s is a power of two.

    Raises:
        ValueError: shapes, formats, strides or devices do not fit; the message names the tensor.
    """
    name, device, real = "v4 connect", streams.device, (torch.float32,)
    check(name, "streams", streams, (None, None, None), FLOATS, device)
    rows, count, size = streams.shape
    outputs, width = count * (2 + count), count * size
    check(name, "weight", weight, (outputs, width), real, device)
    check(name, "base", base, (outputs,), real, device)
    check(name, "scale", scale, (outputs,), real, device)
    if count & (count - 1) or steps < 1:
        raise ValueError(
            f"{name}: {count} streams and {steps} steps; streams must be a power of two, and steps "
            "1 or more"
        )
    read = torch.empty(rows, size, dtype=streams.dtype, device=device)
    pre = torch.empty(rows, count, dtype=torch.float32, device=device)
    post, mix = torch.empty_like(pre), pre.new_empty(rows, count, count)
    if not rows:
        return read, post, mix
    splits = triton.cdiv(width, SPLIT)
    parts = pre.new_empty(splits, rows, outputs)
    squares = pre.new_empty(splits, rows)
    stream_scores_kernel[(triton.cdiv(rows, ROWS), splits)](
        streams, weight, parts, squares, rows, OUTPUTS=outputs, WIDTH=width, SPLIT=SPLIT,
        ROWS=ROWS, OUT_TILE=max(16, triton.next_power_of_2(outputs)), TILE=TILE, num_warps=4,
    )  # fmt: skip
    stream_weights_kernel[(rows,)](
        parts, squares, base, scale, pre, post, mix, rows, norm_eps, eps, COUNT=count,
        WIDTH=width, SPLITS=splits, STEPS=steps, num_warps=1,
    )  # fmt: skip
    tile = min(READ, triton.next_power_of_2(size))
    stream_read_kernel[(rows, triton.cdiv(size, tile))](
        streams, pre, read, COUNT=count, SIZE=size, TILE=tile, num_warps=4
    )
    return read, post, mix


def spread(streams: Tensor, output: Tensor, post: Tensor, mix: Tensor) -> Tensor:
    """See kernels.reference.v4.spread; all tensors are contiguous.

    Raises:
        ValueError: shapes, formats, strides or devices do not fit; the message names the tensor.
    """
    name, device, real = "v4 spread", streams.device, (torch.float32,)
    check(name, "streams", streams, (None, None, None), FLOATS, device)
    rows, count, size = streams.shape
    check(name, "output", output, (rows, size), FLOATS, device)
    check(name, "post", post, (rows, count), real, device)
    check(name, "mix", mix, (rows, count, count), real, device)
    out = torch.empty_like(streams)
    if rows:
        tile = min(READ, triton.next_power_of_2(size))
        stream_spread_kernel[(rows, triton.cdiv(size, tile))](
            streams, output, post, mix, out, COUNT=count, SIZE=size, TILE=tile, num_warps=4
        )
    return out
