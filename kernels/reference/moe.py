"""Expert routing and combination as in their papers, one row at a time."""

import torch
from torch import Tensor


def route(scores: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """See kernels.interface.Kernels.route; the lowest id wins a tie.

    Source: Shazeer et al. 2017, equations 3 to 5.
    """
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
    """See kernels.interface.Kernels.combine."""
    return torch.einsum("tkn,tk->tn", outputs.float(), weights).to(outputs.dtype)
