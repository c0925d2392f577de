"""Expert routing in Triton: one program per row.

Groups of experts are the rows of a tile, so that the scores of a group are side by side. The k best
experts are found one after another: k is small. A NaN is chosen last and is the weight of its own
row only.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.interface import Routing
from kernels.triton.products.gates import sigmoid
from kernels.triton.products.rounding import round_to

_SOFTMAX, _SIGMOID, _SQRT_SOFTPLUS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_SCORINGS = {"softmax": 0, "sigmoid": 1, "sqrt_softplus": 2}
_LOWEST = tl.constexpr(-1.0e38)  # twice it, the sum of two, is finite
_TINY = tl.constexpr(1e-20)  # as in kernels.torch.moe
_NO_ID = tl.constexpr(1 << 30)


@triton.jit
def _best(values):
    """The highest of a tile [A, B]."""
    return tl.max(tl.max(values, axis=1), axis=0)


@triton.jit
def _odds(score, inside, SCORING: tl.constexpr):
    if SCORING == _SOFTMAX:
        score = tl.where(inside, score, float("-inf"))
        share = tl.exp(score - _best(score))
        odds = share / tl.sum(tl.sum(share, axis=1), axis=0)
    elif SCORING == _SIGMOID:
        odds = sigmoid(score)
    else:
        # log(1 + e) by Kahan's correction: exact where 1 + e rounds.
        small = tl.exp(-tl.abs(score))
        one = 1.0 + small
        gained = tl.where(one == 1.0, 1.0, one - 1.0)
        log = tl.where(one == 1.0, small, tl.log(one) * (small / gained))
        odds = tl.sqrt(tl.where(score > 0, score, 0.0) + log)
        odds = tl.where(score == score, odds, score)
    return odds


@triton.jit
def _without_other_groups(
    choice, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_TILE: tl.constexpr,
    SIZE_TILE: tl.constexpr,
):  # fmt: skip
    group = tl.arange(0, GROUP_TILE)
    place = tl.arange(0, SIZE_TILE)[None, :]
    first = tl.max(choice, axis=1)
    where = tl.min(tl.where(choice == first[:, None], place, SIZE_TILE), axis=1)
    second = tl.max(tl.where(place == where[:, None], float("-inf"), choice), axis=1)
    total = tl.where(group < GROUPS, first + second, float("-inf"))
    kept = tl.zeros([GROUP_TILE], tl.int32)
    for _ in range(TOP_GROUPS):
        free = tl.where(kept > 0, float("-inf"), total)
        number = tl.min(tl.where((free == tl.max(free, axis=0)) & (kept == 0), group, _NO_ID))
        kept = tl.where(group == number, 1, kept)
    return tl.where(kept[:, None] > 0, choice, float("-inf"))


@triton.jit
def route_kernel(
    scores, bias, chosen, weights, ids, row_stride, scale,
    SCORING: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CHOSEN: tl.constexpr, TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, SIZE: tl.constexpr,
    GROUP_TILE: tl.constexpr, SIZE_TILE: tl.constexpr, K_TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUP_TILE)[:, None]
    place = tl.arange(0, SIZE_TILE)[None, :]
    inside = (group < GROUPS) & (place < SIZE)
    expert = tl.where(inside, group * SIZE + place, _NO_ID)
    raw = tl.load(scores + row * row_stride + group * SIZE + place, mask=inside, other=0.0)
    odds = _odds(raw.to(tl.float32), inside, SCORING)
    choice = odds
    if HAS_BIAS:
        choice += tl.load(bias + group * SIZE + place, mask=inside, other=0.0)
    choice = tl.where(choice == choice, choice, _LOWEST)
    choice = tl.where(inside, choice, float("-inf"))
    if GROUPS > 1:
        choice = _without_other_groups(choice, GROUPS, TOP_GROUPS, GROUP_TILE, SIZE_TILE)
    column = tl.arange(0, K_TILE)
    picked = tl.zeros([K_TILE], tl.float32)
    numbers = tl.zeros([K_TILE], tl.int32)
    total = 0.0
    free = inside
    for at in range(TOP_K):
        if HAS_CHOSEN:
            number = tl.load(chosen + row * TOP_K + at).to(tl.int32)
        else:
            left = tl.where(free, choice, float("-inf"))
            best = tl.where((left == _best(left)) & free, expert, _NO_ID)
            number = tl.min(tl.min(best, axis=1), axis=0)
            free = free & (expert != number)
        own = tl.sum(tl.sum(tl.where(expert == number, odds, 0.0), axis=1), axis=0)
        total += own
        picked = tl.where(column == at, own, picked)
        numbers = tl.where(column == at, number, numbers)
    if RENORMALISE:
        if SCORING != _SOFTMAX:
            total += _TINY
        picked = picked / total
    picked = picked * scale
    if SCORING == _SOFTMAX:
        picked = round_to(picked, raw.dtype).to(tl.float32)
    known = column < TOP_K
    tl.store(weights + row * TOP_K + column, picked, mask=known)
    tl.store(ids + row * TOP_K + column, numbers.to(tl.int64), mask=known)


def route(
    scores: Tensor, routing: Routing, bias: Tensor | None = None, chosen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See kernels.interface.Kernels.route; the lowest id wins a tie.

    Raises:
        ValueError: a shape, format, stride or device does not fit.
    """
    _check(scores, routing, bias, chosen)
    rows, experts = scores.shape
    weights = torch.empty(rows, routing.top_k, dtype=torch.float32, device=scores.device)
    ids = torch.empty(rows, routing.top_k, dtype=torch.int64, device=scores.device)
    if rows:
        size = experts // routing.groups
        route_kernel[(rows,)](
            scores, scores if bias is None else bias, ids if chosen is None else chosen, weights,
            ids, scores.stride(0), routing.scale, SCORING=_SCORINGS[routing.scoring],
            HAS_BIAS=bias is not None, HAS_CHOSEN=chosen is not None, TOP_K=routing.top_k,
            RENORMALISE=routing.renormalise, GROUPS=routing.groups, TOP_GROUPS=routing.top_groups,
            SIZE=size, GROUP_TILE=triton.next_power_of_2(routing.groups),
            SIZE_TILE=triton.next_power_of_2(size),
            K_TILE=triton.next_power_of_2(routing.top_k), num_warps=1,
        )  # fmt: skip
    return weights, ids


def _check(scores: Tensor, routing: Routing, bias: Tensor | None, chosen: Tensor | None) -> None:
    if scores.dim() != 2 or scores.stride(1) != 1 or scores.shape[1] % routing.groups:
        raise ValueError(
            f"route: scores {tuple(scores.shape)} must be [T, E] with adjacent elements and a "
            f"multiple of {routing.groups} groups"
        )
    rows, experts = scores.shape
    if routing.top_k > experts // routing.groups * routing.top_groups:
        raise ValueError(
            f"route: top_k is {routing.top_k}, but only "
            f"{experts // routing.groups * routing.top_groups} of {experts} experts can be chosen"
        )
    if bias is not None and (
        bias.shape != (experts,) or bias.dtype != torch.float32 or not bias.is_contiguous()
    ):
        raise ValueError(f"route: bias must be contiguous float32 [{experts}], got {bias.dtype} "
                         f"{tuple(bias.shape)}")  # fmt: skip
    if chosen is not None and (
        chosen.shape != (rows, routing.top_k)
        or chosen.dtype != torch.int64
        or not chosen.is_contiguous()
    ):
        raise ValueError(
            f"route: chosen must be contiguous int64 {(rows, routing.top_k)}, got {chosen.dtype} "
            f"{tuple(chosen.shape)}"
        )
    for name, other in (("bias", bias), ("chosen", chosen)):
        if other is not None and other.device != scores.device:
            raise ValueError(f"route: {name} is on {other.device}, scores are on {scores.device}")
