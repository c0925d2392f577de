"""What a drawn token does to its sequence: pure rules of ending, in the order in which they win."""

from typing import NamedTuple

from services.engine.contract.runner import SamplingRow
from services.engine.contract.sampling_params import SamplingParams
from services.engine.scheduling.sequence import Sequence, SequenceStatus


class Ending(NamedTuple):
    """How a choice ends."""

    reason: str
    status: SequenceStatus
    matched_token_id: int | None = None


_MAX_TOKENS = Ending("MAX_TOKENS", SequenceStatus.FINISHED_LENGTH)
_GRAMMAR_COMPLETE = Ending("GRAMMAR_COMPLETE", SequenceStatus.FINISHED_STOPPED)
_CONTEXT_FULL = Ending("CONTEXT_FULL", SequenceStatus.FINISHED_LENGTH)
_DEAD_ROW = SamplingRow(SamplingParams(temperature=0.0), seed=0, choice=0, position=0)


def ending_after(seq: Sequence) -> Ending | None:
    """How the sequence ends with its last token, if it does.

    Neither an end token nor a stop token counts before `min_tokens` are out; a grammar that leaves
    nothing to say ends the choice in any case.
    """
    params = seq.request.params
    num_output = seq.num_output
    if num_output == 0:
        return None
    if num_output >= params.min_tokens:
        token = seq.tokens[-1]
        if token in seq.request.end_ids:
            return Ending("EOS", SequenceStatus.FINISHED_STOPPED, token)
        if params.stop_token_ids and token in params.stop_token_ids:
            return Ending("STOP_TOKEN", SequenceStatus.FINISHED_STOPPED, token)
    if seq.matcher is not None and seq.matcher.spent:
        return _GRAMMAR_COMPLETE
    if len(seq.tokens) < seq.max_length:
        return None
    if params.max_tokens is not None and num_output >= params.max_tokens:
        return _MAX_TOKENS
    return _CONTEXT_FULL


def sampling_row(seq: Sequence) -> SamplingRow:
    """What the sampler needs for the sequence's next token; its history is exact now."""
    if seq.finished:
        return _DEAD_ROW
    request = seq.request
    params = request.params
    tokens, history = seq.tokens, _needs_history(params)
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


def _needs_history(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )
