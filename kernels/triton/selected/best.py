"""The numbers of a row's best scores, ascending, found digit by digit instead of by sorting.

The bits of a float, with the order of negative ones turned round, compare like the float. The k-th
best score is found from its highest eight bits to its lowest: a histogram of each digit says in
which bin it lies. Scores above it are taken, and of those equal to it the earliest ones. So the
result depends on the scores alone. Source: Alabi et al. 2012 (radix selection).
"""

import triton
import triton.language as tl


@triton.jit
def _comparable(score):
    """uint32 that compares like the score; -0 and 0 are equal."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.uint32, bitcast=True)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _narrow(line, visible, found, left, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """One digit of the k-th best: `found` with it, and how many of its equals are still to take."""
    counts = tl.zeros([256], tl.int32)
    for start in range(0, visible, TILE):
        number = start + tl.arange(0, TILE)
        inside = number < visible
        key = _comparable(tl.load(line + number, mask=inside, other=0.0))
        if SHIFT < 24:
            inside = inside & ((key >> (SHIFT + 8)) == (found >> (SHIFT + 8)))
        counts += tl.histogram(((key >> SHIFT) & 255).to(tl.int32), 256, mask=inside)
    digit = tl.arange(0, 256)
    at_least = tl.sum(counts, axis=0) - tl.cumsum(counts, axis=0) + counts
    chosen = tl.max(tl.where(at_least >= left, digit, 0), axis=0)
    left -= tl.sum(tl.where(digit > chosen, counts, 0), axis=0)
    return found | (chosen.to(tl.uint32) << SHIFT), left


@triton.jit
def best_kernel(
    scores, starts, lengths, chosen, row_first, score_stride, num_sequences,
    TOP_K: tl.constexpr, RATIO: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (rows from row_first on): the numbers go to chosen [T, TOP_K], padded with -1."""
    row = row_first + tl.program_id(0)
    if row >= tl.load(starts + num_sequences):
        return
    low = 0
    high = num_sequences - 1
    while low < high:
        between = (low + high + 1) // 2
        if tl.load(starts + between) <= row:
            low = between
        else:
            high = between - 1
    # The sequence's last row stands at its last position.
    position = tl.load(lengths + low) - (tl.load(starts + low + 1) - row)
    visible = (position + 1) // RATIO
    line = scores + tl.program_id(0).to(tl.int64) * score_stride
    out = chosen + row.to(tl.int64) * TOP_K
    if visible <= TOP_K:
        for start in range(0, TOP_K, TILE):
            number = start + tl.arange(0, TILE)
            tl.store(out + number, tl.where(number < visible, number, -1), mask=number < TOP_K)
        return
    found = (row * 0).to(tl.uint32)
    left = row * 0 + TOP_K
    found, left = _narrow(line, visible, found, left, 24, TILE)
    found, left = _narrow(line, visible, found, left, 16, TILE)
    found, left = _narrow(line, visible, found, left, 8, TILE)
    found, left = _narrow(line, visible, found, left, 0, TILE)
    written = row * 0
    equals = row * 0
    for start in range(0, visible, TILE):
        number = start + tl.arange(0, TILE)
        inside = number < visible
        key = _comparable(tl.load(line + number, mask=inside, other=0.0))
        equal = ((key == found) & inside).to(tl.int32)
        early = (equals + tl.cumsum(equal, axis=0)) <= left
        take = (((key > found) & inside) | ((equal != 0) & early)).to(tl.int32)
        where = written + tl.cumsum(take, axis=0) - 1
        tl.store(out + where, number, mask=take != 0)
        written += tl.sum(take, axis=0)
        equals += tl.sum(equal, axis=0)
