"""From logits to tokens; keeps no state, so a row's token depends on its own inputs alone.

Log-probabilities are of the raw logits: before bias, penalties, masks and temperature.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.dispatch import Kernels
from services.engine.logit_edits import edit_logits
from services.engine.runner import SampledToken
from services.engine.sampling_inputs import SamplingInputs
from services.engine.truncation import truncate


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
        best = logits.max(-1)
        if inputs.plain_greedy:
            ids, top = best.indices, best.values
        else:
            ids, top = self._draw(logits, inputs)
        broken = _indices(~best.values.isfinite())
        empty = tuple(i for i in _indices(top == float("-inf")) if i not in broken)
        tokens = self._report(logits, ids, inputs, broken)
        return Draw(tokens, ids, broken, empty)

    def _draw(self, logits: Tensor, inputs: SamplingInputs) -> tuple[Tensor, Tensor]:
        edited = logits.clone() if inputs.edited else logits
        for index in inputs.edited:
            edit_logits(edited[index], inputs.rows[index])
        best = edited.max(-1)
        ids = best.indices
        if inputs.drawn is not None:
            scores = edited.index_select(0, inputs.drawn).div_(inputs.temperatures)
            truncate(scores, [row.params for row in inputs.drawn_rows])
            ids = ids.index_copy(0, inputs.drawn, self._sample(scores, inputs.keys))
        return ids, best.values

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


def _indices(mask: Tensor) -> tuple[int, ...]:
    return tuple(mask.nonzero().flatten().tolist())
