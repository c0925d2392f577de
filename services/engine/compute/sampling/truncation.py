"""Truncates the distribution: top-k, then top-p among the remaining ids, then min-p.

Each rule gives a lowest score to keep. Equal scores are kept or dropped together, so the result
does not depend on how a sort breaks ties.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from services.engine.contract.sampling_params import SamplingParams

PARTIAL_SORT = 512
"""Highest scores to sort before all of them."""


def is_truncated(params: SamplingParams, vocab_size: int) -> bool:
    """Whether top-k, top-p or min-p is on."""
    return 0 < params.top_k < vocab_size or params.top_p < 1 or params.min_p > 0


def truncate(scores: Tensor, params: Sequence[SamplingParams]) -> None:
    """Set the scores of dropped ids to -inf, in place.

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
    """Lowest score of the smallest set of likeliest ids whose probabilities add up to top_p."""
    if limit < row.shape[0]:
        ranked = row.topk(limit).values
        return _cut(ranked, ranked.logsumexp(0), top_p)
    total = row.logsumexp(0)
    ranked = row.topk(min(PARTIAL_SORT, limit)).values
    if (ranked - total).exp().sum() < top_p:
        ranked = row.sort(descending=True).values
    return _cut(ranked, total, top_p)


def _cut(ranked: Tensor, total: Tensor, top_p: float) -> Tensor:
    before = (ranked - total).exp().cumsum(0).roll(1)
    before[0] = 0
    kept = int((before < top_p).sum())
    return ranked[kept - 1]
