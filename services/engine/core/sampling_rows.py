"""`sampling_row`: what the sampler needs of one sequence that samples a token in this round."""

from services.engine.contract.runner import SamplingRow
from services.engine.contract.sampling_params import SamplingParams
from services.engine.scheduling.sequence import Sequence

_DISCARDED_ROW = SamplingRow(SamplingParams(temperature=0.0), seed=0, choice=0, position=0)
"""Row of a sequence that has ended: its token is discarded."""


def sampling_row(seq: Sequence) -> SamplingRow:
    """The row of the sequence's next token.

    Call it once the result of the round before is accounted for: history and mask are exact then.
    """
    if seq.finished:
        return _DISCARDED_ROW
    request = seq.request
    params = request.params
    tokens, history = seq.tokens, params.has_penalty
    return SamplingRow(
        params,
        params.seed or 0,
        seq.choice,
        len(tokens),
        request.prompt if history else (),
        tuple(tokens[seq.num_prompt :]) if history else (),
        _forbidden(seq),
        None if seq.matcher is None else seq.matcher.mask,
    )


def _forbidden(seq: Sequence) -> tuple[int, ...]:
    request = seq.request
    if seq.num_output >= request.params.min_tokens:
        return request.never_ids
    return tuple(sorted({*request.end_and_stop_ids, *request.never_ids}))
