"""`RequestOutput`: the output of a request so far, and the pool that builds it from rounds.

A round reports only new tokens (`ChoiceOutput`). The pool adds them to one record per request. The
records that it returns keep growing with later rounds; call `clone` for a copy that does not.
"""

from dataclasses import dataclass, field, replace

from services.engine.contract.finish_reason import FinishReason
from services.engine.contract.messages import ChoiceOutput, RequestFailure, TokenLogprobs


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a request."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    """Set by `LLM`, if it has a tokenizer."""
    finish_reason: FinishReason | None = None
    """None while the choice runs."""
    matched_token_id: int | None = None
    stop_string: str | None = None
    """The stop string that ended the choice."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def clone(self) -> "CompletionOutput":
        """An independent copy."""
        return replace(self, token_ids=list(self.token_ids), logprobs=list(self.logprobs))


@dataclass(slots=True)
class RequestOutput:
    """The output of one request."""

    request_key: str
    prompt_token_ids: tuple[int, ...]
    choices: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    failure: RequestFailure | None = None
    """Set if the request failed."""
    released: bool = False
    """Whether its last block is released: nothing is added any more."""

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return self.failure is not None or all(c.finish_reason for c in self.choices)

    def clone(self) -> "RequestOutput":
        """An independent copy that later rounds do not change."""
        return replace(
            self,
            choices=[choice.clone() for choice in self.choices],
            prompt_logprobs=list(self.prompt_logprobs),
        )


class RequestOutputPool:
    """The outputs of all open requests."""

    def __init__(self) -> None:
        self._by_key: dict[str, RequestOutput] = {}

    def open(self, request_key: str, prompt_token_ids: tuple[int, ...], n: int) -> None:
        """Start the output of a request."""
        choices = [CompletionOutput(index) for index in range(n)]
        self._by_key[request_key] = RequestOutput(request_key, prompt_token_ids, choices)

    def add(self, output: ChoiceOutput) -> RequestOutput | None:
        """Add what a round produced; None if the request is not open."""
        owner = self._by_key.get(output.request_key)
        if owner is None:
            return None
        choice = owner.choices[output.choice]
        choice.token_ids += output.token_ids
        choice.logprobs += output.logprobs
        if output.finish_reason is not None:
            choice.finish_reason = output.finish_reason
            choice.matched_token_id = output.matched_token_id
        owner.num_cached_tokens = max(owner.num_cached_tokens, output.num_cached_tokens)
        owner.prompt_logprobs += output.prompt_logprobs
        return owner

    def fail(self, failure: RequestFailure) -> RequestOutput | None:
        """Set the failure of a request; None if the request is not open."""
        owner = self._by_key.get(failure.request_key)
        if owner is not None:
            owner.failure = failure
        return owner

    def release(self, request_key: str) -> RequestOutput | None:
        """Remove a request and return its output, which no longer changes; None if not open."""
        owner = self._by_key.pop(request_key, None)
        if owner is not None:
            owner.released = True
        return owner
