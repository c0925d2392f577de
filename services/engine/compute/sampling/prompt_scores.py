"""Log-probabilities of prompt tokens, of the sequences that report them."""

from collections.abc import Callable, Sequence

from torch import Tensor

from services.engine.compute.models.input_metadata import PromptRows
from services.engine.compute.sampling.sampler import token_logprobs
from services.engine.contract.runner import SampledToken

PROMPT_LOGPROB_ROWS = 64
"""Rows of a prompt whose logits are in memory at one time, at most."""
Head = Callable[[Tensor], Tensor]
"""Hidden states [rows, hidden] -> logits [rows, vocabulary] float32."""


def score_prompts(
    head: Head, hidden: Tensor, prompts: Sequence[PromptRows]
) -> tuple[tuple[int, tuple[SampledToken, ...]], ...]:
    """seq_id and entries of each sequence.

    Args:
        hidden: [T, hidden] of the round.
    """
    return tuple((own.seq_id, _score(head, hidden, own)) for own in prompts)


def _score(head: Head, hidden: Tensor, own: PromptRows) -> tuple[SampledToken, ...]:
    entries: list[SampledToken] = []
    for at in range(0, len(own.rows), PROMPT_LOGPROB_ROWS):
        part = slice(at, at + PROMPT_LOGPROB_ROWS)
        logits = head(hidden.index_select(0, own.rows[part]))
        entries += token_logprobs(logits, own.targets[part], own.top)
    return tuple(entries)
