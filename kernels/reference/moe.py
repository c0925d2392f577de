"""Expert routing and combination as in their papers, one row at a time."""

import torch
from torch import Tensor

from kernels.interface import Routing


def route(
    scores: Tensor, routing: Routing, bias: Tensor | None = None, chosen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See kernels.interface.Kernels.route; the lowest id wins a tie."""
    weights, ids = [], []
    for index, row in enumerate(scores.float()):
        odds = _odds(row, routing)
        biased = odds if bias is None else odds + bias
        picked = _pick(biased, routing) if chosen is None else chosen[index].tolist()
        weights.append(_weigh(odds[picked], routing))
        ids.append(torch.tensor(picked))
    if not weights:
        return scores.new_empty(0, routing.top_k).float(), torch.empty(0, routing.top_k).long()
    return torch.stack(weights), torch.stack(ids)


def combine(outputs: Tensor, weights: Tensor) -> Tensor:
    """See kernels.interface.Kernels.combine."""
    return torch.einsum("tkn,tk->tn", outputs.float(), weights).to(outputs.dtype)


def _odds(row: Tensor, routing: Routing) -> Tensor:
    match routing.scoring:
        case "softmax":
            return row.softmax(-1)
        case "sigmoid":
            return 1 / (1 + (-row).exp())
        case "sqrt_softplus":
            return row.exp().log1p().sqrt()


def _pick(odds: Tensor, routing: Routing) -> list[int]:
    size = len(odds) // routing.groups
    allowed = list(range(len(odds)))
    if routing.groups > 1:
        totals = [float(group.topk(2).values.sum()) for group in odds.view(-1, size)]
        best = sorted(range(routing.groups), key=lambda group: (-totals[group], group))
        kept = best[: routing.top_groups]
        allowed = [expert for expert in allowed if expert // size in kept]
    return sorted(allowed, key=lambda expert: (-float(odds[expert]), expert))[: routing.top_k]


def _weigh(odds: Tensor, routing: Routing) -> Tensor:
    return (odds / odds.sum() if routing.renormalise else odds) * routing.scale
