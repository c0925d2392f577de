"""From logits to tokens; keeps no state, so a row's token depends on its own inputs alone.

Log-probabilities are of the raw logits: before bias, penalties, masks and temperature.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.interface import Kernels
from kernels.torch.sample import arg_max
from services.engine.compute.sampling.logit_edits import edit_logits
from services.engine.compute.sampling.sampling_inputs import SamplingInputs
from services.engine.compute.sampling.truncation import truncate
from services.engine.contract.runner import SampledToken


@dataclass(frozen=True, slots=True)
class Draw:
    """One round's result on host and device."""

    tokens: tuple[SampledToken, ...]
    device_tokens: Tensor
    """[rows] int64."""
    nan_rows: tuple[int, ...]
    empty_rows: tuple[int, ...]


class Sampler:
    """Draws with one set of kernels.

    Args:
        one_by_one: each row in calls of its own, so that no operator sees the batch.
    """

    def __init__(self, kernels: Kernels, *, one_by_one: bool = False) -> None:
        self._kernels = kernels
        self._one_by_one = one_by_one

    def __call__(self, logits: Tensor, inputs: SamplingInputs) -> Draw:
        """Draw one token per row of logits, [rows, vocabulary] float32; changes nothing of it."""
        best, highest = _best(logits)
        ids, top = (best, highest) if inputs.plain_greedy else self._draw(logits, inputs)
        broken = tuple(i for i, score in enumerate(highest) if not math.isfinite(score))
        empty = tuple(i for i, s in enumerate(top) if s == -math.inf and i not in broken)
        tokens = self._report(logits, ids, inputs, broken)
        return Draw(tokens, ids, broken, empty)

    def _draw(self, logits: Tensor, inputs: SamplingInputs) -> tuple[Tensor, list[float]]:
        """Ids, and each row's highest score after its edits."""
        edited = logits.clone() if inputs.edited else logits
        for index in inputs.edited:
            edit_logits(edited[index], inputs.rows[index])
        ids, highest = _best(edited)
        if inputs.drawn is not None:
            scores = edited.index_select(0, inputs.drawn).div_(inputs.temperatures)
            truncate(scores, [row.params for row in inputs.drawn_rows])
            ids = ids.index_copy(0, inputs.drawn, self._sample(scores, inputs.keys))
        return ids, highest

    def _sample(self, scores: Tensor, keys: Tensor) -> Tensor:
        if not self._one_by_one:
            return self._kernels.sample(scores, keys)
        return torch.cat(
            [
                self._kernels.sample(scores[i : i + 1].clone(), keys[i : i + 1])
                for i in range(scores.shape[0])
            ]
        )

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
    """Log-probability of one id per row, and of the likeliest `num_top`, best first."""
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(1, ids.unsqueeze(1)).squeeze(1).tolist()
    best = logprobs.topk(num_top)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    tops = [tuple(zip(i, v, strict=True)) for i, v in pairs]
    return [
        SampledToken(token_id, logprob, top)
        for token_id, logprob, top in zip(ids.tolist(), own, tops, strict=True)
    ]


def _best(scores: Tensor) -> tuple[Tensor, list[float]]:
    """Id and score of each row's arg-max; the score is NaN if any of the row is."""
    ids = arg_max(scores)
    highest: list[float] = scores.gather(1, ids.unsqueeze(1)).squeeze(1).tolist()
    return ids, highest
