"""What a request has given so far: `RequestOutput`, and the pool that makes it from rounds.

A round tells only what is new (`ChoiceOutput`). The pool keeps one growing record per request; the
records it returns go on growing with later rounds, so a caller that keeps one keeps its `clone`.
"""

from dataclasses import dataclass, field, replace

from services.engine.contract.messages import ChoiceOutput, RequestFailure, TokenLogprobs


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a request."""

    index: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    """Filled by `LLM`, if it has a tokenizer."""
    finish_reason: str | None = None
    """EOS, STOP_TOKEN, STOP_STRING, MAX_TOKENS, CONTEXT_FULL or GRAMMAR_COMPLETE."""
    matched_token_id: int | None = None
    stop_string: str | None = None
    """The one that ended the choice."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def clone(self) -> "CompletionOutput":
        """An independent copy."""
        return replace(self, token_ids=list(self.token_ids), logprobs=list(self.logprobs))


@dataclass(slots=True)
class RequestOutput:
    """One request: its prompt, its choices and, if it failed, why."""

    request_key: str
    prompt_token_ids: tuple[int, ...]
    choices: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    failure: RequestFailure | None = None
    released: bool = False
    """Its last block is free again: nothing more will come."""

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
    """The growing outputs of all requests that somebody still waits for."""

    def __init__(self) -> None:
        self._by_key: dict[str, RequestOutput] = {}

    def open(self, request_key: str, prompt_token_ids: tuple[int, ...], n: int) -> None:
        """Expect outputs of a request."""
        choices = [CompletionOutput(index) for index in range(n)]
        self._by_key[request_key] = RequestOutput(request_key, prompt_token_ids, choices)

    def add(self, output: ChoiceOutput) -> RequestOutput | None:
        """Take what a round gave; None for a request that nobody waits for."""
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
        """Take a failure; None for a request that nobody waits for."""
        owner = self._by_key.get(failure.request_key)
        if owner is not None:
            owner.failure = failure
        return owner

    def release(self, request_key: str) -> RequestOutput | None:
        """Forget a request; its record stays with the caller and grows no more."""
        owner = self._by_key.pop(request_key, None)
        if owner is not None:
            owner.released = True
        return owner
