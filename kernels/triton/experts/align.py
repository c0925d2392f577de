"""Sorts the chosen rows by expert and cuts them into tiles, on the device and in a fixed order.

A pair is one chosen expert of one row: number `row * k + column`. Three launches: count the pairs
of each expert in every chunk of CHUNK pairs; scan the counts; put each pair in its place. The sort
is stable, so the result does not depend on the order in which programs end.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 64
"""Pairs of one program."""
_STEP = 16
"""Chunks that the scan adds at a time."""
GROUP_TILES = 4
"""Tiles that share their weights in the cache: their number is a multiple of it."""


@dataclass(frozen=True, slots=True)
class Aligned:
    """Pairs in the order of their experts. Bins: experts, one for pairs without one, padding."""

    order: Tensor
    """[pairs] int32: the pair at each position; positions beyond the last expert's are not set."""
    begins: Tensor
    """[bins] int32: first position of each expert."""
    counts: Tensor
    """[bins] int32: pairs of each expert."""
    tile_experts: Tensor
    """[tiles] int32: the expert of each tile; -1 for a tile without rows."""
    tile_begins: Tensor
    """[tiles] int32: first position of each tile."""
    rows: int
    """Positions of a tile, at most; tiles never hold two experts."""


@triton.jit
def count_kernel(ids, chunk_counts, pairs, EXPERTS: tl.constexpr, BINS: tl.constexpr,
                 CHUNK: tl.constexpr):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(ids + at, mask=at < pairs, other=-1).to(tl.int32)
    known = (expert >= 0) & (expert < EXPERTS)
    counts = tl.histogram(tl.where(known, expert, EXPERTS), BINS)
    tl.store(chunk_counts + chunk * BINS + tl.arange(0, BINS), counts)


@triton.jit
def scan_kernel(
    chunk_counts, begins, counts, tile_ends, loads, chunks,
    HAS_LOADS: tl.constexpr, EXPERTS: tl.constexpr, BINS: tl.constexpr, STEP: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    bins = tl.arange(0, BINS)
    total = tl.zeros([BINS], tl.int32)
    for first in range(0, chunks, STEP):
        chunk = first + tl.arange(0, STEP)[:, None]
        where = chunk_counts + chunk.to(tl.int64) * BINS + bins[None, :]
        own = tl.load(where, mask=chunk < chunks, other=0)
        # Pairs of the same expert in earlier chunks.
        tl.store(where, tl.cumsum(own, axis=0) - own + total[None, :], mask=chunk < chunks)
        total += tl.sum(own, axis=0)
    total = tl.where(bins < EXPERTS, total, 0)
    tl.store(counts + bins, total)
    tl.store(begins + bins, tl.cumsum(total, axis=0) - total)
    tl.store(tile_ends + bins, tl.cumsum((total + ROWS - 1) // ROWS, axis=0))
    if HAS_LOADS:
        inside = bins < EXPERTS
        before = tl.load(loads + bins, mask=inside, other=0)
        tl.store(loads + bins, before + total, mask=inside)


@triton.jit
def _place_in_expert(ids, chunk_counts, chunk, pairs, EXPERTS: tl.constexpr, BINS: tl.constexpr,
                     CHUNK: tl.constexpr):  # fmt: skip
    """(pair, expert or EXPERTS, earlier pairs of the same expert) of a chunk."""
    own = tl.arange(0, CHUNK)
    at = chunk * CHUNK + own
    expert = tl.load(ids + at, mask=at < pairs, other=-1).to(tl.int32)
    expert = tl.where((expert >= 0) & (expert < EXPERTS), expert, EXPERTS)
    earlier = (expert[None, :] == expert[:, None]) & (own[None, :] < own[:, None])
    place = tl.sum(earlier.to(tl.int32), axis=1)
    place += tl.load(chunk_counts + chunk * BINS + expert)
    return at, expert, place


@triton.jit
def place_kernel(
    ids, chunk_counts, begins, tile_ends, order, tile_experts, tile_begins, pairs, chunks, tiles,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, LEVELS: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    if program < chunks:
        pair, expert, place = _place_in_expert(
            ids, chunk_counts, program, pairs, EXPERTS, BINS, CHUNK
        )
        known = expert < EXPERTS
        position = tl.load(begins + expert) + place
        tl.store(order + position, pair.to(tl.int32), mask=known)
    else:
        tile = ((program - chunks) * CHUNK + tl.arange(0, CHUNK)).to(tl.int32)
        # Experts whose tiles end at or before this one, by bisection.
        expert = tl.zeros([CHUNK], tl.int32)
        for level in tl.static_range(1, LEVELS + 1):
            ended = tl.load(tile_ends + expert + (BINS >> level) - 1) <= tile
            expert = tl.where(ended, expert + (BINS >> level), expert)
        used = expert < EXPERTS
        before = tl.load(tile_ends + expert - 1, mask=used & (expert > 0), other=0)
        begin = tl.load(begins + expert, mask=used, other=0) + (tile - before) * ROWS
        tl.store(tile_experts + tile, tl.where(used, expert, -1), mask=tile < tiles)
        tl.store(tile_begins + tile, begin, mask=tile < tiles)


@triton.jit
def slot_kernel(
    ids, chunk_counts, slots, copies, assigned, pairs, first, tile,
    WIDTH: tl.constexpr, EXPERTS: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    pair, expert, place = _place_in_expert(ids, chunk_counts, chunk, pairs, EXPERTS, BINS, CHUNK)
    known = expert < EXPERTS
    count = tl.load(copies + expert, mask=known, other=1)
    copy = (place // tile + first) % count
    slot = tl.load(slots + expert * WIDTH + copy, mask=known, other=-1)
    tl.store(assigned + pair, slot, mask=pair < pairs)


def num_bins(experts: int) -> int:
    """Bins of a sort: a power of two, with at least one for pairs without an expert."""
    return max(16, 1 << experts.bit_length())


def num_tiles(pairs: int, experts: int, rows: int) -> int:
    """Tiles that any choice of experts needs at most: every expert may leave one part full."""
    tiles = pairs // rows + min(experts, pairs)
    return -(-tiles // GROUP_TILES) * GROUP_TILES


def align(ids: Tensor, experts: int, rows: int, loads: Tensor | None = None) -> Aligned:
    """Sort the pairs of `ids` by expert.

    Args:
        ids: [T, k] int64, contiguous; numbers outside 0 to `experts` - 1 mean none.
        experts: number of experts.
        rows: positions of a tile.
        loads: [experts] int64: the pairs of each expert are added to it.

    Raises:
        ValueError: a shape, format, stride or device does not fit.
    """
    _check(ids, experts, loads)
    device, pairs, bins = ids.device, ids.numel(), num_bins(experts)
    tiles = num_tiles(pairs, experts, rows)
    order, tile_experts, tile_begins, begins, counts, tile_ends = (
        torch.empty(size, dtype=torch.int32, device=device)
        for size in (pairs, tiles, tiles, bins, bins, bins)
    )
    aligned = Aligned(order, begins, counts, tile_experts, tile_begins, rows)
    if not pairs:
        return aligned
    chunk_counts, chunks = _count(ids, experts)
    scan_kernel[(1,)](
        chunk_counts, begins, counts, tile_ends, counts if loads is None else loads, chunks,
        HAS_LOADS=loads is not None, EXPERTS=experts, BINS=bins, STEP=_STEP, ROWS=rows,
        num_warps=8,
    )  # fmt: skip
    place_kernel[(chunks + triton.cdiv(tiles, CHUNK),)](
        ids, chunk_counts, begins, tile_ends, order, tile_experts, tile_begins, pairs, chunks,
        tiles, EXPERTS=experts, BINS=bins, LEVELS=bins.bit_length() - 1, CHUNK=CHUNK, ROWS=rows,
        num_warps=2,
    )  # fmt: skip
    return aligned


def assign_slots(ids: Tensor, slots: Tensor, copies: Tensor, first: int, tile: int) -> Tensor:
    """See kernels.expert_products.ExpertKernels.assign_slots; all tensors are contiguous.

    Raises:
        ValueError: a shape, format, stride or device does not fit.
    """
    experts = len(copies)
    _check(ids, experts, copies)
    if slots.dim() != 2 or len(slots) != experts or slots.dtype != torch.int64:
        raise ValueError(
            f"assign_slots: slots must be int64 [{experts}, copies], got {slots.dtype} "
            f"{tuple(slots.shape)}"
        )
    if not slots.is_contiguous() or slots.device != ids.device:
        raise ValueError(f"assign_slots: slots must be contiguous and on {ids.device}")
    assigned = torch.empty_like(ids)
    if ids.numel():
        bins = num_bins(experts)
        chunk_counts, chunks = _count(ids, experts)
        unused = torch.empty(3, bins, dtype=torch.int32, device=ids.device)
        scan_kernel[(1,)](
            chunk_counts, unused[0], unused[1], unused[2], unused, chunks, HAS_LOADS=False,
            EXPERTS=experts, BINS=bins, STEP=_STEP, ROWS=1, num_warps=8,
        )  # fmt: skip
        slot_kernel[(chunks,)](
            ids, chunk_counts, slots, copies, assigned, ids.numel(), first, tile,
            WIDTH=slots.shape[1], EXPERTS=experts, BINS=bins, CHUNK=CHUNK, num_warps=2,
        )  # fmt: skip
    return assigned


def _count(ids: Tensor, experts: int) -> tuple[Tensor, int]:
    """Pairs of each expert in every chunk [chunks, bins], and the number of chunks."""
    pairs, bins = ids.numel(), num_bins(experts)
    chunks = triton.cdiv(pairs, CHUNK)
    chunk_counts = torch.empty(chunks, bins, dtype=torch.int32, device=ids.device)
    count_kernel[(chunks,)](
        ids, chunk_counts, pairs, EXPERTS=experts, BINS=bins, CHUNK=CHUNK, num_warps=1
    )
    return chunk_counts, chunks


def _check(ids: Tensor, experts: int, per_expert: Tensor | None) -> None:
    if ids.dim() != 2 or ids.dtype != torch.int64 or not ids.is_contiguous():
        raise ValueError(
            f"experts: ids must be contiguous int64 [T, k], got {ids.dtype} {tuple(ids.shape)}"
        )
    if ids.numel() >= 2**31:
        raise ValueError(f"experts: {ids.numel()} chosen rows are too many for one round")
    if per_expert is not None and (
        per_expert.shape != (experts,)
        or per_expert.dtype != torch.int64
        or not per_expert.is_contiguous()
        or per_expert.device != ids.device
    ):
        raise ValueError(
            f"experts: numbers per expert must be contiguous int64 [{experts}] on {ids.device}, "
            f"got {per_expert.dtype} {tuple(per_expert.shape)} on {per_expert.device}"
        )
