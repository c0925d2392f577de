"""Whether a request can be served at all, decided before any work; and its records if so."""

from dataclasses import dataclass

from services.common import block_hash
from services.common.errors import InvalidArgumentError
from services.engine.contract.messages import AddRequest
from services.engine.contract.runner import RunnerInfo
from services.engine.contract.sampling_params import SamplingParams
from services.engine.scheduling.kv_cache import KVCacheManager
from services.engine.scheduling.sequence import Request

_FIELD = "token_ids"


@dataclass(frozen=True, slots=True)
class Limits:
    """What this engine can hold; fixed at start."""

    info: RunnerInfo
    memory: KVCacheManager
    hash_namespace: bytes

    def make_request(self, message: AddRequest, arrival: int) -> Request:
        """The records of a request that can be served.

        Raises:
            InvalidArgumentError: a field is out of range, or the request can never fit.
        """
        params = message.params.validated(self.info.vocab_size)
        prompt = tuple(message.prompt_token_ids)
        self._check_prompt(prompt)
        self._check_continued(message)
        wanted = len(prompt) + (params.max_tokens or self.memory.max_model_len)
        return Request(
            key=message.request_key,
            prompt=prompt,
            params=params,
            arrival=arrival,
            root_hash=block_hash.root(self.hash_namespace, message.salt),
            end_ids=frozenset(() if params.ignore_eos else self.info.eos_token_ids),
            never_ids=_never_ids(params, self.info.eos_token_ids),
            priority=message.priority,
            tenant=message.tenant,
            deadline_unix_s=message.deadline_unix_s,
            # The last token of all needs no keys and values.
            max_length=min(wanted, self.memory.max_model_len, self.memory.num_positions + 1),
        )

    def _check_prompt(self, prompt: tuple[int, ...]) -> None:
        if not prompt:
            raise InvalidArgumentError.for_field(_FIELD, "the prompt is empty")
        self._check_ids(_FIELD, prompt)
        longest = self.memory.max_model_len
        if len(prompt) >= longest:
            raise InvalidArgumentError.for_field(
                _FIELD,
                f"the prompt has {len(prompt)} tokens and leaves no room for an answer: the "
                f"context is {longest} tokens",
                reason="CONTEXT_LENGTH_EXCEEDED",
                prompt_tokens=str(len(prompt)),
                max_model_len=str(longest),
            )
        if len(prompt) > self.memory.num_positions:
            raise InvalidArgumentError.for_field(
                _FIELD,
                f"the prompt has {len(prompt)} tokens, this engine's memory holds "
                f"{self.memory.num_positions}",
                reason="PROMPT_EXCEEDS_MEMORY",
                prompt_tokens=str(len(prompt)),
                kv_tokens=str(self.memory.num_positions),
            )

    def _check_continued(self, message: AddRequest) -> None:
        if len(message.continued) > message.params.n:
            raise InvalidArgumentError.for_field("continuation", "more choices than sampling.n")
        for tokens in message.continued:
            self._check_ids("continuation", tokens)
            longest = self.memory.max_model_len
            if len(message.prompt_token_ids) + len(tokens) > longest:
                raise InvalidArgumentError.for_field(
                    "continuation", f"does not fit the context of {longest} tokens"
                )

    def _check_ids(self, field: str, token_ids: tuple[int, ...] | list[int]) -> None:
        size = self.info.vocab_size
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < size):
            bad = next(i for i in token_ids if not 0 <= i < size)
            raise InvalidArgumentError.for_field(
                field, f"token id {bad} is outside the vocabulary of {size}"
            )


def _never_ids(params: SamplingParams, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Of a constrained request: a grammar's text is whole, so no stop token cuts it, and an end
    token that the request ignores cannot end it. One that is both ends it as a stop token."""
    if params.constraint is None:
        return ()
    ends, stops = set(eos_token_ids), set(params.stop_token_ids)
    ignored = ends - stops if params.ignore_eos else set()
    return tuple(sorted((stops - ends) | ignored))
