"""Hyper-connections: four streams a row, mixed at each site by weights that follow from them."""

from typing import NamedTuple

import torch
from torch import Tensor

from tests.engine.compute.models.v41_oracle import formats
from tests.engine.compute.models.v41_oracle.shape import Shape
from tests.engine.compute.models.v41_oracle.weights import Weights


class Mix(NamedTuple):
    """How a site reads and writes the streams."""

    collapse: Tensor
    """[T, S]: used by the NEXT site."""
    expand: Tensor
    """[T, S]"""
    between: Tensor
    """[T, S, S]: from stream, to stream."""


def balanced(square: Tensor, rounds: int, eps: float) -> Tensor:
    """[T, S, S] with rows and columns that sum to about one (Sinkhorn), columns last."""
    square = square.softmax(-1) + eps
    square = square / (square.sum(-2, keepdim=True) + eps)
    for _ in range(rounds - 1):
        square = square / (square.sum(-1, keepdim=True) + eps)
        square = square / (square.sum(-2, keepdim=True) + eps)
    return square


def mix(shape: Shape, weights: Weights, site: str, streams: Tensor) -> Mix:
    """The mix of one site, `layers.N.hc_attn` or `layers.N.hc_ffn`, of streams [T, S, D]."""
    many = shape.hc_mult
    base, scale = weights[f"{site}_base"], weights[f"{site}_scale"]
    flat = formats.normed(streams.flatten(1), shape.rms_norm_eps)
    raw = flat @ weights[f"{site}_fn"].T
    square = raw[:, 2 * many :] * scale[2] + base[2 * many :]
    return Mix(
        torch.sigmoid(raw[:, :many] * scale[0] + base[:many]) + shape.hc_eps,
        2 * torch.sigmoid(raw[:, many : 2 * many] * scale[1] + base[many : 2 * many]),
        balanced(square.unflatten(-1, (many, many)), shape.hc_sinkhorn_iters, shape.hc_eps),
    )


def first_collapse(shape: Shape, rows: int, dtype: torch.dtype) -> Tensor:
    """[T, S]: what the first site of all reads, stream 0 alone."""
    one = torch.zeros(rows, shape.hc_mult, dtype=dtype)
    one[:, 0] = 1
    return one


def collapse_of(before: Tensor, own: Mix) -> Tensor:
    """[T, S]: a site reads the streams with the weights of the site before, not with its own."""
    del own
    return before


def collapsed(streams: Tensor, collapse: Tensor) -> Tensor:
    """[T, D]"""
    return (collapse[..., None] * streams).sum(1)


def expanded(streams: Tensor, output: Tensor, site: Mix) -> Tensor:
    """[T, S, D]: the streams after a sublayer with output [T, D]."""
    moved = torch.einsum("tjk,tjd->tkd", site.between, streams)
    return site.expand[..., None] * output[:, None] + moved
