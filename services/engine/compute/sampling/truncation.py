"""Top-k, then top-p among what is left, then min-p: which scores may be drawn.

Each is a lowest score that stays; equal scores stay or go together, so the kept set does not
depend on how a sort breaks ties.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from services.engine.contract.sampling_params import SamplingParams

FIRST_LOOK = 512
"""Highest scores sorted before falling back to all of them."""


def is_truncated(params: SamplingParams, vocab_size: int) -> bool:
    """Whether any of the three is on."""
    return 0 < params.top_k < vocab_size or params.top_p < 1 or params.min_p > 0


def truncate(scores: Tensor, params: Sequence[SamplingParams]) -> None:
    """Set to -inf, in place, what may not be drawn.

    Args:
        scores: [rows, vocabulary] float32, already divided by the temperature.
        params: one per row.
    """
    for row, own in zip(scores, params, strict=True):
        if is_truncated(own, scores.shape[1]):
            row.masked_fill_(row < _lowest_kept(row, own), float("-inf"))


def _lowest_kept(row: Tensor, params: SamplingParams) -> Tensor:
    size = row.shape[0]
    limit = min(params.top_k or size, size)
    lowest = torch.full((), float("-inf"), device=row.device)
    best = row.max()
    if params.top_p < 1:
        lowest = _nucleus(row, limit, params.top_p)
    elif limit < size:
        lowest = row.topk(limit).values[-1]
    if params.min_p > 0:
        lowest = torch.maximum(lowest, best + torch.tensor(params.min_p).log().to(row.device))
    return torch.minimum(lowest, best)


def _nucleus(row: Tensor, limit: int, top_p: float) -> Tensor:
    """Score of the last of the likeliest tokens whose probabilities sum to top_p or more."""
    if limit < row.shape[0]:
        ranked = row.topk(limit).values
        return _cut(ranked, ranked.logsumexp(0), top_p)
    total = row.logsumexp(0)
    ranked = row.topk(min(FIRST_LOOK, limit)).values
    if (ranked - total).exp().sum() < top_p:
        ranked = row.sort(descending=True).values
    return _cut(ranked, total, top_p)


def _cut(ranked: Tensor, total: Tensor, top_p: float) -> Tensor:
    before = (ranked - total).exp().cumsum(0).roll(1)
    before[0] = 0
    kept = int((before < top_p).sum())
    return ranked[kept - 1]
