"""Which compressed entries a row attends to: index scores, top-k, candidate blocks."""

import torch
from torch import Tensor

from tests.engine.compute.models.v41_oracle import formats
from tests.engine.compute.models.v41_oracle.shape import Shape
from tests.engine.compute.models.v41_oracle.weights import Weights


def index_queries(
    shape: Shape, weights: Weights, layer: int, latent: Tensor, positions: Tensor
) -> Tensor:
    """[T, index heads, index d], of the query latents [T, q_lora]."""
    flat = latent @ weights[f"layers.{layer}.attn.indexer.wq_b.weight"].T
    heads = flat.unflatten(-1, (shape.index_n_heads, shape.index_head_dim))
    table = formats.compress_frequencies(shape)
    return formats.index_values(formats.rotated(heads, positions, table))


def scores(queries: Tensor, keys: Tensor, head_weights: Tensor) -> Tensor:
    """[T, G]: sum over heads of weight * ReLU(query . key), both scaled down."""
    heads, width = queries.shape[1:]
    dots = torch.einsum("thd,gd->thg", queries, keys).relu() * width**-0.5
    return (dots * (head_weights * heads**-0.5)[..., None]).sum(1)


def best(score: Tensor, seen: Tensor, count: int) -> Tensor:
    """[T, G] bool: the `count` best of the entries that are seen; of equal ones, the older."""
    hidden = score.masked_fill(~seen, float("-inf"))
    order = hidden.argsort(dim=-1, descending=True, stable=True)
    chosen = torch.zeros_like(seen)
    chosen.scatter_(1, order[:, :count], True)
    return chosen & seen


def candidates(score: Tensor, seen: Tensor, blocks: int, size: int) -> Tensor:
    """[T, G] bool: the entries of the best blocks, a block being as good as its best entry.

    The block with the newest entry seen is always among them.
    """
    count = score.shape[1]
    missing = -count % size
    padded = torch.nn.functional.pad(
        score.masked_fill(~seen, float("-inf")), (0, missing), value=float("-inf")
    )
    worth = padded.unflatten(-1, (-1, size)).amax(-1)
    newest = (seen.sum(1) - 1).clamp(min=0) // size
    worth.scatter_(1, newest[:, None], float("inf"))
    chosen = best(worth, worth > float("-inf"), blocks)
    return chosen.repeat_interleave(size, 1)[:, :count] & seen
