"""Expert routing and combination; the result of a row does not depend on other rows."""

from torch import Tensor


def route(scores: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """See kernels.interface.Kernels.route."""
    weights, ids = scores.float().softmax(-1).topk(top_k, dim=-1)
    if renormalise:
        # Column by column: the order of a row's sum must not depend on the number of rows.
        total = weights[:, 0].clone()
        for column in range(1, top_k):
            total.add_(weights[:, column])
        weights = weights / total.unsqueeze(1)
    return weights.to(scores.dtype).float(), ids


def combine(outputs: Tensor, weights: Tensor) -> Tensor:
    """See kernels.interface.Kernels.combine."""
    # Two calls, not a fused multiply-add: vector code would round once, the scalar code for the
    # remaining elements twice.
    total = outputs[:, 0].float() * weights[:, :1]
    for column in range(1, outputs.shape[1]):
        total.add_(outputs[:, column].float() * weights[:, column : column + 1])
    return total.to(outputs.dtype)
