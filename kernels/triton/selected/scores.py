"""An indexer's scores: the sum over index heads of weight * ReLU(query . key)."""

import triton
import triton.language as tl

from kernels.triton.ragged.extend import find_sequence


@triton.jit
def index_scores_kernel(
    queries, weights, cache, tables, starts, lengths, scores, row_first, row_stop, score_stride,
    query_stride, head_stride, weight_stride, table_stride, num_sequences,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, PER_BLOCK: tl.constexpr,
    RATIO: tl.constexpr, QUERIES: tl.constexpr, HEAD_TILE: tl.constexpr, DIM_TILE: tl.constexpr,
    TILE: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of QUERIES rows of one sequence, tiles of TILE entries).

    Entry e stands for positions up to RATIO * (e + 1) - 1; a row sees it if its own is not before
    that. It lies in the block of its last position; a block has BLOCK positions and room for
    PER_BLOCK entries. The heads of one row are the rows of a product, so a row's scores do not
    depend on the rows beside it. Scores of row r go to line r - row_first; those of invisible
    entries are not written.
    """
    seq, tile = find_sequence(starts, tl.program_id(0), 0, num_sequences, QUERIES)
    first_row = tl.load(starts + seq)
    count = tl.load(starts + seq + 1) - first_row
    begin = tl.load(lengths + seq) - count
    stop = tl.minimum((tile + 1) * QUERIES, count)
    entry = tl.program_id(1) * TILE + tl.arange(0, TILE)
    if tile * QUERIES >= count:
        return
    if tl.program_id(1) * TILE >= (begin + stop) // RATIO:
        return
    known = entry < (begin + stop) // RATIO
    block = ((entry + 1) * RATIO - 1) // BLOCK
    line = tables + seq.to(tl.int64) * table_stride
    slot = tl.load(line + block, mask=known, other=0).to(tl.int64) * PER_BLOCK + entry % PER_BLOCK
    at, head = tl.arange(0, DIM_TILE), tl.arange(0, HEAD_TILE)
    keys = tl.load(
        cache + slot[:, None] * DIM + at[None, :],
        mask=known[:, None] & (at[None, :] < DIM),
        other=0.0,
    )
    inside = (head[:, None] < HEADS) & (at[None, :] < DIM)
    for number in range(tile * QUERIES, stop):
        row = first_row + number
        if (row >= row_first) & (row < row_stop):
            wide = row.to(tl.int64)
            where = queries + wide * query_stride + head[:, None] * head_stride + at[None, :]
            query = tl.load(where, mask=inside, other=0.0)
            if WIDEN:
                each = tl.dot(
                    query.to(tl.float32), tl.trans(keys.to(tl.float32)), input_precision="ieee"
                )
            else:
                each = tl.dot(query, tl.trans(keys), input_precision="ieee")
            weight = tl.load(weights + wide * weight_stride + head, mask=head < HEADS, other=0.0)
            total = tl.sum(tl.maximum(each, 0.0) * weight[:, None], axis=0)
            seen = entry < (begin + number + 1) // RATIO
            tl.store(scores + (wide - row_first) * score_stride + entry, total, mask=seen)
