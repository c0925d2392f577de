"""Routing and combination of experts as their papers write them, one row at a time."""

import torch
from torch import Tensor


def route(scores: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """softmax, the top_k likeliest, lowest id on ties (Shazeer et al. 2017, eq. 3 to 5)."""
    weights, ids = [], []
    for row in scores.float():
        odds = row.softmax(-1)
        ranked = sorted(range(len(odds)), key=lambda expert: (-float(odds[expert]), expert))
        chosen = odds[ranked[:top_k]]
        weights.append(chosen / chosen.sum() if renormalise else chosen)
        ids.append(torch.tensor(ranked[:top_k]))
    if not weights:
        return scores.new_empty(0, top_k).float(), torch.empty(0, top_k, dtype=torch.long)
    return torch.stack(weights), torch.stack(ids)


def combine(outputs: Tensor, weights: Tensor) -> Tensor:
    """Sum over the chosen experts of weight times output."""
    return torch.einsum("tkn,tk->tn", outputs.float(), weights).to(outputs.dtype)
