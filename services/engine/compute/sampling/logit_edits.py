"""Changes a row of logits before the temperature: bias, penalties, masks, in this order.

Masks come last, so that nothing can make a forbidden id possible again.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.engine.contract.runner import SamplingRow

_NEVER = float("-inf")


def edit_logits(logits: Tensor, row: SamplingRow) -> None:
    """Apply a row's bias, penalties and masks to its logits [vocabulary] float32, in place."""
    params = row.params
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        logits[_ids(ids, logits)] += torch.tensor(biases, dtype=logits.dtype, device=logits.device)
    if params.has_penalty:
        _penalise(logits, row)
    if params.allowed_token_ids:
        _keep_only(logits, _ids(params.allowed_token_ids, logits))
    if row.token_mask is not None:
        logits.masked_fill_(~unpack_mask(row.token_mask, logits), _NEVER)
    forbidden = (*params.bad_token_ids, *row.forbid_token_ids)
    if forbidden:
        logits[_ids(forbidden, logits)] = _NEVER


def unpack_mask(words: object, like: Tensor) -> Tensor:
    """Allowed ids [vocabulary] bool from 32-bit words, lowest bit first; missing words forbid."""
    raw = np.ascontiguousarray(np.asarray(words, dtype=np.int32)).reshape(-1)
    bits = np.unpackbits(raw.view(np.uint8), bitorder="little")[: like.shape[0]]
    allowed = np.zeros(like.shape[0], dtype=np.bool_)
    allowed[: len(bits)] = bits
    return torch.from_numpy(allowed).to(like.device)


def _ids(ids: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(ids, dtype=torch.long, device=like.device)


def _keep_only(logits: Tensor, allowed: Tensor) -> None:
    kept = logits[allowed]
    logits.fill_(_NEVER)
    logits[allowed] = kept


def _penalise(logits: Tensor, row: SamplingRow) -> None:
    """Apply the repetition penalty to prompt and output, the others to the output only.

    Source of the repetition penalty: Keskar et al. 2019.
    """
    params = row.params
    if params.repetition_penalty != 1:
        seen = _ids(tuple({*row.prompt_token_ids, *row.output_token_ids}), logits)
        old = logits[seen]
        factor = params.repetition_penalty
        logits[seen] = torch.where(old > 0, old / factor, old * factor)
    counts = Counter(row.output_token_ids)
    if counts and (params.presence_penalty or params.frequency_penalty):
        times = torch.tensor(list(counts.values()), dtype=logits.dtype, device=logits.device)
        drop = times * params.frequency_penalty + params.presence_penalty
        logits[_ids(tuple(counts), logits)] -= drop
