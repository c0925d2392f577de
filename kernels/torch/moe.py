"""Expert routing and combination; the result of a row does not depend on other rows."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from kernels.interface import Routing
from kernels.torch.whole_vectors import by_row

_TINY = 1e-20
"""Added to a row's sum of sigmoids, so that nothing is divided by 0; as the models are trained."""


def route(
    scores: Tensor, routing: Routing, bias: Tensor | None = None, chosen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See kernels.interface.Kernels.route."""
    if routing.scoring == "softmax":
        odds = scores.float().softmax(-1)
    else:
        odds = by_row(_FUNCTIONS[routing.scoring], scores.float())
    if chosen is None and bias is None and routing.groups == 1:
        weights, ids = odds.topk(routing.top_k, dim=-1)
    else:
        ids = _pick(odds, routing, bias) if chosen is None else chosen
        weights = odds.gather(1, ids)
    if routing.renormalise:
        # Column by column: the order of a row's sum must not depend on the number of rows.
        total = weights[:, 0].clone()
        for column in range(1, routing.top_k):
            total.add_(weights[:, column])
        if routing.scoring != "softmax":
            total.add_(_TINY)
        weights = weights / total.unsqueeze(1)
    if routing.scale != 1:
        weights = weights * routing.scale
    if routing.scoring == "softmax":
        weights = weights.to(scores.dtype).float()
    return weights, ids


def combine(outputs: Tensor, weights: Tensor) -> Tensor:
    """See kernels.interface.Kernels.combine."""
    # Two calls, not a fused multiply-add: vector code would round once, the scalar code for the
    # remaining elements twice.
    total = outputs[:, 0].float() * weights[:, :1]
    for column in range(1, outputs.shape[1]):
        total.add_(outputs[:, column].float() * weights[:, column : column + 1])
    return total.to(outputs.dtype)


def _pick(odds: Tensor, routing: Routing, bias: Tensor | None) -> Tensor:
    """Experts of each row [T, k] int64, best first."""
    biased = odds if bias is None else odds + bias
    if routing.groups > 1:
        size = odds.shape[1] // routing.groups
        grouped = biased.view(len(odds), routing.groups, size)
        best = grouped.topk(2, dim=-1).values
        groups = (best[..., 0] + best[..., 1]).topk(routing.top_groups, dim=-1).indices
        hidden = torch.ones(grouped.shape[:2], dtype=torch.bool, device=odds.device)
        hidden.scatter_(1, groups, False)
        biased = grouped.masked_fill(hidden.unsqueeze(-1), float("-inf")).flatten(1)
    return biased.topk(routing.top_k, dim=-1).indices


def _sqrt_softplus(scores: Tensor) -> Tensor:
    return functional.softplus(scores).sqrt_()


_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "sqrt_softplus": _sqrt_softplus,
}
