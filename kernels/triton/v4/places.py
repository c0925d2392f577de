"""Where the row of a position is: among the round's rows, or in its sequence's ring."""

import torch
import triton
import triton.language as tl

from kernels.triton.checks import check
from kernels.triton.ragged.attention import check_batch
from kernels.triton.ragged.extend import row_sequence
from kernels.v4 import Rings


@triton.jit
def place_row(starts, lengths, slots, line, num_sequences):
    """Of a row: sequence, first row, positions before the round, own position, slot.

    The position is -1 for a row beyond the last sequence.
    """
    seq = row_sequence(starts, line, num_sequences)
    first_row = tl.load(starts + seq)
    stop = tl.load(starts + seq + 1)
    length = tl.load(lengths + seq)
    position = tl.where(line < stop, length - (stop - line), -1)
    return seq, first_row, length - (stop - first_row), position, tl.load(slots + seq).to(tl.int64)


@triton.jit
def load_places(
    rows, ring, place, known, first_row, begin, slot, offset, at, inside,
    WIDTH: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """Elements `offset + at` of the rows [T, WIDTH] or ring [slots, RING, WIDTH] of positions.

    [places, elements], 0 where a position is not known. Rows and ring have one format: an address
    is chosen, so that each element is loaded once.
    """
    new = rows + (first_row + place - begin).to(tl.int64) * WIDTH
    old = ring + (slot * RING + place % RING) * WIDTH
    where = tl.where(place >= begin, new, old)
    return tl.load(
        where[:, None] + offset + at[None, :], mask=known[:, None] & inside[None, :], other=0.0
    )


@triton.jit
def rotate(x, cos, sin, PAIRS: tl.constexpr):
    """Rotate the pairs (2i, 2i + 1) of x [ROWS, 2 PAIRS] by angles [PAIRS]."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], PAIRS, 2)))
    cos, sin = cos[None, :], sin[None, :]
    turned = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    return tl.reshape(turned, (x.shape[0], 2 * PAIRS))


@triton.jit
def load_angles(line, DIM: tl.constexpr, TURNED: tl.constexpr, PAIRS: tl.constexpr):
    """Cosines and sines [PAIRS] of a head of DIM elements whose last TURNED are rotated.

    `line` points to [TURNED / 2, 2].
    """
    pair = tl.arange(0, PAIRS) - (DIM - TURNED) // 2
    turned = (pair >= 0) & (pair < TURNED // 2)
    cos = tl.load(line + 2 * pair, mask=turned, other=1.0)
    sin = tl.load(line + 2 * pair + 1, mask=turned, other=0.0)
    return cos, sin


def check_rings(operation: str, rings: Rings, device: torch.device) -> None:
    """Refuse rings whose tensors do not fit together.

    Raises:
        ValueError: the message names the tensor.
    """
    check_batch(operation, rings.batch, device)
    count = len(rings.batch.lengths)
    check(operation, "slots", rings.slots, (count,), (torch.int32,), device)
