"""Whether a choice ends with its last token: pure rules, in the order in which they apply."""

from typing import NamedTuple

from services.engine.contract.finish_reason import FinishReason
from services.engine.scheduling.sequence import Sequence, SequenceStatus


class Ending(NamedTuple):
    """How a choice ends."""

    reason: FinishReason
    status: SequenceStatus
    matched_token_id: int | None = None
    """The end or stop token."""


_MAX_TOKENS = Ending(FinishReason.MAX_TOKENS, SequenceStatus.FINISHED_LENGTH)
_GRAMMAR_COMPLETE = Ending(FinishReason.GRAMMAR_COMPLETE, SequenceStatus.FINISHED_STOPPED)
_CONTEXT_FULL = Ending(FinishReason.CONTEXT_FULL, SequenceStatus.FINISHED_LENGTH)


def ending_after(seq: Sequence) -> Ending | None:
    """How the sequence ends with its last token; None if it goes on.

    End tokens and stop tokens do not count before `min_tokens` tokens are generated. A grammar that
    is complete ends the choice in any case.
    """
    params = seq.request.params
    num_output = seq.num_output
    if num_output == 0:
        return None
    if num_output >= params.min_tokens:
        token = seq.tokens[-1]
        if token in seq.request.end_ids:
            return Ending(FinishReason.EOS, SequenceStatus.FINISHED_STOPPED, token)
        if params.stop_token_ids and token in params.stop_token_ids:
            return Ending(FinishReason.STOP_TOKEN, SequenceStatus.FINISHED_STOPPED, token)
    if seq.matcher is not None and seq.matcher.must_end:
        return _GRAMMAR_COMPLETE
    if len(seq.tokens) < seq.max_length:
        return None
    if params.max_tokens is not None and num_output >= params.max_tokens:
        return _MAX_TOKENS
    return _CONTEXT_FULL
