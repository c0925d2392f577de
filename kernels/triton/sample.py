"""Stateless sampling: arg-max of score plus Gumbel noise, a hash of row key and token id.

One kernel finds the best token of each tile of a row, a second one the best tile. The lowest id
wins a tie in both, so the result does not depend on the order in which tiles finish.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024
"""Token ids of one tile."""
_BELOW_ONE = tl.constexpr(1 - 2**-24)


@triton.jit
def _mix(x):
    # A 32-bit permutation; constants from the lowbias32 family (Wellons, hash-prospector).
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0xD35A2D97
    return x ^ (x >> 15)


@triton.jit
def _gumbel(first, second, index):
    word = _mix(_mix(index * 0x9E3779B9 + first) ^ second) & 0x7FFFFFFF
    v = tl.minimum((word.to(tl.float32) + 0.5) * 4.656612873077393e-10, _BELOW_ONE)
    # log1p(-v) by Kahan's correction: exact where 1 - v rounds.
    u = 1.0 - v
    log1p = tl.where(u == 1.0, -v, tl.log(u) * (v / (1.0 - u)))
    return -tl.log(-log1p)


@triton.jit
def sample_tile_kernel(
    scores, keys, best, where, row_stride, num_tiles, SIZE: tl.constexpr, TILE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    at = tile * TILE + tl.arange(0, TILE)
    inside = at < SIZE
    score = tl.load(scores + row * row_stride + at, mask=inside, other=float("-inf"))
    first = tl.load(keys + 2 * row).to(tl.uint32, bitcast=True)
    second = tl.load(keys + 2 * row + 1).to(tl.uint32, bitcast=True)
    noisy = tl.where(inside, score + _gumbel(first, second, at.to(tl.uint32)), float("-inf"))
    value, index = tl.max(noisy, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best + row * num_tiles + tile, value)
    tl.store(where + row * num_tiles + tile, tile * TILE + index)


@triton.jit
def sample_row_kernel(best, where, out, num_tiles, TILES: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    inside = tile < num_tiles
    values = tl.load(best + row * num_tiles + tile, mask=inside, other=float("-inf"))
    _, index = tl.max(values, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(out + row, tl.load(where + row * num_tiles + index).to(tl.int64))


def sample(scores: Tensor, keys: Tensor) -> Tensor:
    """See kernels.interface.Kernels.sample; keys is contiguous."""
    rows, size = scores.shape
    if scores.stride(1) != 1 or keys.shape != (rows, 2) or not keys.is_contiguous():
        raise ValueError(
            f"sample: for scores {tuple(scores.shape)} with adjacent elements, keys must be "
            f"contiguous {(rows, 2)}, got {tuple(keys.shape)}"
        )
    out = torch.empty(rows, dtype=torch.int64, device=scores.device)
    if rows:
        tiles = triton.cdiv(size, TILE)
        best = torch.empty(rows, tiles, dtype=torch.float32, device=scores.device)
        where = torch.empty(rows, tiles, dtype=torch.int32, device=scores.device)
        sample_tile_kernel[(rows, tiles)](
            scores, keys, best, where, scores.stride(0), tiles, SIZE=size, TILE=TILE, num_warps=4
        )
        sample_row_kernel[(rows,)](
            best, where, out, tiles, TILES=triton.next_power_of_2(tiles), num_warps=1
        )
    return out
