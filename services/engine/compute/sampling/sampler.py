"""Samples tokens from logits. It keeps no state, so a row's token depends on its own inputs alone.

Log-probabilities are those of the raw logits: before bias, penalties, masks and temperature.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.interface import Kernels
from services.engine.compute.sampling.logit_edits import edit_logits
from services.engine.compute.sampling.sampling_inputs import SamplingInputs
from services.engine.compute.sampling.truncation import truncate
from services.engine.contract.runner import SampledToken


@dataclass(frozen=True, slots=True)
class Draw:
    """The sampled tokens of one round, on host and device."""

    tokens: tuple[SampledToken, ...]
    device_tokens: Tensor
    """[rows] int64."""
    nan_rows: tuple[int, ...]
    """Rows whose logits are not finite."""
    empty_rows: tuple[int, ...]
    """Rows whose masks leave no token."""


class Sampler:
    """Samples with one kernel set.

    Args:
        one_by_one: sample each row in a call of its own, so that the batch cannot affect a row.
    """

    def __init__(self, kernels: Kernels, *, one_by_one: bool = False) -> None:
        self._kernels = kernels
        self._one_by_one = one_by_one

    def __call__(self, logits: Tensor, inputs: SamplingInputs) -> Draw:
        """Sample one token per row of logits [rows, vocabulary] float32, which stay unchanged."""
        best, highest = self._best(logits)
        ids, top = (best, highest) if inputs.plain_greedy else self._sample(logits, inputs)
        broken = tuple(i for i, score in enumerate(highest) if not math.isfinite(score))
        empty = tuple(i for i, s in enumerate(top) if s == -math.inf and i not in broken)
        tokens = self._report(logits, ids, inputs, broken)
        return Draw(tokens, ids, broken, empty)

    def _sample(self, logits: Tensor, inputs: SamplingInputs) -> tuple[Tensor, list[float]]:
        """Ids [rows] int64, and each row's highest score after its edits."""
        edited = logits.clone() if inputs.edited else logits
        for index in inputs.edited:
            edit_logits(edited[index], inputs.rows[index])
        ids, highest = self._best(edited)
        if inputs.drawn is not None:
            scores = edited.index_select(0, inputs.drawn).div_(inputs.temperatures)
            truncate(scores, [row.params for row in inputs.drawn_rows])
            ids = ids.index_copy(0, inputs.drawn, self._draw(scores, inputs.keys))
        return ids, highest

    def _draw(self, scores: Tensor, keys: Tensor) -> Tensor:
        if not self._one_by_one:
            return self._kernels.sample(scores, keys)
        return torch.cat(
            [
                self._kernels.sample(scores[i : i + 1].clone(), keys[i : i + 1])
                for i in range(scores.shape[0])
            ]
        )

    def _best(self, scores: Tensor) -> tuple[Tensor, list[float]]:
        """Id and score of each row's arg-max; the score is NaN if the row holds a NaN."""
        ids = self._kernels.arg_max(scores)
        highest: list[float] = scores.gather(1, ids.unsqueeze(1)).squeeze(1).tolist()
        return ids, highest

    def _report(
        self, logits: Tensor, ids: Tensor, inputs: SamplingInputs, broken: Sequence[int]
    ) -> tuple[SampledToken, ...]:
        tokens = [SampledToken(token_id) for token_id in ids.tolist()]
        wanted = [row for row in inputs.logprobs if row not in broken]
        if wanted:
            index = torch.tensor(wanted, device=logits.device)
            entries = token_logprobs(logits[index], ids[index], inputs.num_top)
            for row, entry in zip(wanted, entries, strict=True):
                top = entry.top[: inputs.rows[row].params.top_logprobs]
                tokens[row] = SampledToken(entry.token_id, entry.logprob, top)
        return tuple(tokens)


def token_logprobs(logits: Tensor, ids: Tensor, num_top: int) -> list[SampledToken]:
    """Log-probabilities of one id per row, and of the `num_top` likeliest ids, best first.

    Args:
        logits: [rows, vocabulary].
        ids: [rows] int64.
    """
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(1, ids.unsqueeze(1)).squeeze(1).tolist()
    best = logprobs.topk(num_top)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    tops = [tuple(zip(i, v, strict=True)) for i, v in pairs]
    return [
        SampledToken(token_id, logprob, top)
        for token_id, logprob, top in zip(ids.tolist(), own, tops, strict=True)
    ]
