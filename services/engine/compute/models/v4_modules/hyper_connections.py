"""Residual streams of a row, and how a sublayer reads and writes them (hyper-connections).

A row has several streams instead of one residual. Before a sublayer they are added with weights
`pre`; after it, its output is added to all streams with weights `post`, and the streams are mixed
by a matrix whose rows and columns add up to about 1. All weights depend on the row. Sources: Zhu et
al. 2024 (hyper-connections); DeepSeek-AI 2025 (manifold-constrained hyper-connections).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.interface import Kernels
from services.engine.compute.models.v4_modules.fixed_order import add_up, by_vectors
from services.engine.compute.models.weights import WeightReader
from services.engine.contract.deepseek_v4 import DeepseekSizes


@dataclass(frozen=True, slots=True)
class Connection:
    """How one sublayer is connected to the streams of T rows; s streams."""

    pre: Tensor
    """[T, s]."""
    post: Tensor
    """[T, s]."""
    mix: Tensor
    """[T, s, s]: from stream, to stream."""


class _Weights:
    """fn [outputs, s * hidden], base [outputs] and scale [parts] of one site."""

    def __init__(
        self,
        config: DeepseekSizes,
        kernels: Kernels,
        reader: WeightReader,
        at: str,
        parts: tuple[int, ...],
    ) -> None:
        width = config.streams * config.hidden_size
        self._eps, self._norm = config.rms_norm_eps, kernels.rms_norm
        self._project = kernels.pack(reader(f"{at}_fn", sum(parts), width))
        self._base = reader(f"{at}_base", sum(parts))
        scale = reader(f"{at}_scale", len(parts))
        self._scale = scale.repeat_interleave(torch.tensor(parts))
        self._ones = torch.ones(width)

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        rows = (self._base, self._scale, self._ones)
        return self._project.nbytes + sum(row.nbytes for row in rows)

    def scores(self, streams: Tensor) -> Tensor:
        """[T, outputs], of all streams [T, s, hidden] normed as one row."""
        outputs = self._project(self._norm(streams.flatten(1), self._ones, self._eps))
        return outputs.mul_(self._scale).add_(self._base)


class HyperConnection:
    """One site: the attention or the feed-forward network of a layer."""

    def __init__(
        self, config: DeepseekSizes, kernels: Kernels, reader: WeightReader, at: str
    ) -> None:
        """Read the tensors whose names begin with `at`.

        Raises:
            ModelFileError: a tensor is missing or of the wrong shape.
        """
        self._config = config
        count = config.streams
        parts = (count, count, count * count)
        self._weights = _Weights(config, kernels, reader, at, parts)

    @property
    def nbytes(self) -> int:
        """Memory of the weights, in bytes."""
        return self._weights.nbytes

    def connect(self, streams: Tensor) -> Connection:
        """The weights of all rows, from their streams [T, s, hidden]."""
        count, eps = self._config.streams, self._config.hyper_eps
        scores = self._weights.scores(streams)
        ends = by_vectors(torch.sigmoid, scores[:, : 2 * count])
        mix = scores[:, 2 * count :].reshape(-1, count, count)
        return Connection(
            pre=ends[:, :count] + eps,
            post=ends[:, count:] * 2,
            mix=_balanced(mix, self._config.sinkhorn_steps, eps),
        )


class StreamHead:
    """Joins the streams to one row after the last layer."""

    def __init__(
        self, config: DeepseekSizes, kernels: Kernels, reader: WeightReader, at: str
    ) -> None:
        """Read the tensors whose names begin with `at`.

        Raises:
            ModelFileError: a tensor is missing or of the wrong shape.
        """
        self._eps = config.hyper_eps
        self._weights = _Weights(config, kernels, reader, at, (config.streams,))

    @property
    def nbytes(self) -> int:
        """Memory of the weights, in bytes."""
        return self._weights.nbytes

    def __call__(self, streams: Tensor) -> Tensor:
        """[T, hidden] of [T, s, hidden]."""
        scores = self._weights.scores(streams)
        return collapse(streams, by_vectors(torch.sigmoid, scores).add_(self._eps))


def collapse(streams: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum [T, hidden] of streams [T, s, hidden] with weights [T, s]."""
    return add_up((streams * weights.unsqueeze(-1)).unbind(1))


def spread(streams: Tensor, output: Tensor, connection: Connection) -> Tensor:
    """New streams [T, s, hidden], after a sublayer whose output is [T, hidden]."""
    terms = [connection.post.unsqueeze(-1) * output.unsqueeze(1)]
    for source, stream in enumerate(streams.unbind(1)):
        terms.append(connection.mix[:, source].unsqueeze(-1) * stream.unsqueeze(1))
    return add_up(terms)


def _balanced(scores: Tensor, steps: int, eps: float) -> Tensor:
    """A matrix per row whose rows and columns add up to about 1: [T, s, s].

    Source: Sinkhorn and Knopp 1967. The first normalisation of rows is a softmax.
    """
    # Rows of the round come last: the sums then run over whole vectors.
    parts = scores.permute(1, 2, 0).contiguous()
    matrix = by_vectors(torch.exp, parts - parts.amax(1, keepdim=True))
    matrix = (matrix / add_up(matrix.unbind(1)).unsqueeze(1)).add_(eps)
    matrix /= add_up(matrix.unbind(0)).add_(eps)
    for _ in range(steps - 1):
        matrix /= add_up(matrix.unbind(1)).add_(eps).unsqueeze(1)
        matrix /= add_up(matrix.unbind(0)).add_(eps)
    return matrix.permute(2, 0, 1)
