"""Choosing experts and adding their answers up: per row, whatever other rows there are."""

from torch import Tensor


def route(scores: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """See kernels.interface.Kernels.route."""
    weights, ids = scores.float().softmax(-1).topk(top_k, dim=-1)
    if renormalise:
        # Column by column: a row's sum must not depend on how many rows are summed at a time.
        total = weights[:, 0].clone()
        for column in range(1, top_k):
            total.add_(weights[:, column])
        weights = weights / total.unsqueeze(1)
    return weights.to(scores.dtype).float(), ids


def combine(outputs: Tensor, weights: Tensor) -> Tensor:
    """See kernels.interface.Kernels.combine."""
    # Product and sum are two calls: fused, the vector units would round once, their rest twice.
    total = outputs[:, 0].float() * weights[:, :1]
    for column in range(1, outputs.shape[1]):
        total.add_(outputs[:, column].float() * weights[:, column : column + 1])
    return total.to(outputs.dtype)
