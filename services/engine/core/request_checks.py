"""Makes a request's records, after checking that the engine can serve it.

The front checks the same request against the same bounds; these checks also serve `LLM`, and they
alone see the engine's memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from services.common import block_hash
from services.common.errors import InvalidArgumentError
from services.engine.contract.messages import AddRequest, CoreRequest
from services.engine.contract.runner import RunnerInfo
from services.engine.contract.sampling_params import SamplingParams
from services.engine.scheduling.kv_cache import KVCacheManager
from services.engine.scheduling.sequence import Request, Sequence

_FIELD = "token_ids"


@dataclass(frozen=True, slots=True)
class Limits:
    """What this engine can hold; fixed at start."""

    info: RunnerInfo
    memory: KVCacheManager
    hash_namespace: bytes


def request_from(
    message: AddRequest, limits: Limits, arrival: int, seq_ids: Iterator[int]
) -> Request:
    """Make a request with one sequence per choice that has not finished.

    Args:
        arrival: the request's running number.
        seq_ids: unused ids of sequences.

    Raises:
        InvalidArgumentError: a field is out of range, or the request can never fit.
    """
    given, memory, eos_token_ids = message.request, limits.memory, limits.info.eos_token_ids
    params = given.params.validated(limits.info.vocab_size)
    prompt = tuple(given.prompt_token_ids)
    _check_prompt(prompt, limits)
    _check_continued(given, limits)
    wanted = len(prompt) + (params.max_tokens or memory.max_model_len)
    request = Request(
        key=message.request_key,
        prompt=prompt,
        params=params,
        arrival=arrival,
        root_hash=block_hash.root(limits.hash_namespace, given.salt),
        end_ids=frozenset(() if params.ignore_eos else eos_token_ids),
        never_ids=_never_ids(params, eos_token_ids),
        priority=given.priority,
        tenant=given.tenant,
        deadline_unix_s=message.deadline_unix_s,
        # The last token of all needs no keys and values, hence one more than the positions.
        max_length=min(wanted, memory.max_model_len, memory.num_positions + 1),
    )
    request.set_choices(_choices(request, given, seq_ids))
    return request


def _choices(request: Request, given: CoreRequest, seq_ids: Iterator[int]) -> list[Sequence]:
    choices: list[Sequence] = []
    forks = not any(given.continued)
    for choice in range(request.params.n):
        if choice not in given.finished_choices:
            continued = given.continued[choice] if choice < len(given.continued) else ()
            parent = choices[0] if choices and forks else None
            choices.append(Sequence(next(seq_ids), request, choice, tuple(continued), parent))
    return choices


def _check_prompt(prompt: tuple[int, ...], limits: Limits) -> None:
    if not prompt:
        raise InvalidArgumentError.for_field(_FIELD, "the prompt is empty")
    _check_ids(_FIELD, prompt, limits.info.vocab_size)
    longest, positions = limits.memory.max_model_len, limits.memory.num_positions
    if len(prompt) >= longest:
        raise InvalidArgumentError.for_field(
            _FIELD,
            f"the prompt has {len(prompt)} tokens and leaves no room for an answer: the "
            f"context is {longest} tokens",
            reason="CONTEXT_LENGTH_EXCEEDED",
            prompt_tokens=str(len(prompt)),
            max_model_len=str(longest),
        )
    if len(prompt) > positions:
        raise InvalidArgumentError.for_field(
            _FIELD,
            f"the prompt has {len(prompt)} tokens, this engine's memory holds {positions}",
            reason="PROMPT_EXCEEDS_MEMORY",
            prompt_tokens=str(len(prompt)),
            kv_tokens=str(positions),
        )


def _check_continued(given: CoreRequest, limits: Limits) -> None:
    if len(given.continued) > given.params.n:
        raise InvalidArgumentError.for_field(
            "continuation",
            f"has {len(given.continued)} choices, sampling.n is {given.params.n}",
        )
    longest = limits.memory.max_model_len
    for tokens in given.continued:
        _check_ids("continuation", tokens, limits.info.vocab_size)
        if len(given.prompt_token_ids) + len(tokens) > longest:
            raise InvalidArgumentError.for_field(
                "continuation", f"does not fit the context of {longest} tokens"
            )


def _check_ids(field: str, token_ids: tuple[int, ...], vocab_size: int) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        bad = next(i for i in token_ids if not 0 <= i < vocab_size)
        raise InvalidArgumentError.for_field(
            field, f"token id {bad} is outside the vocabulary of {vocab_size}"
        )


def _never_ids(params: SamplingParams, eos_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Tokens that a constrained request may not generate: stop tokens, which would cut the text,
    and end tokens that the request ignores. An ignored end token that is also a stop token ends
    the text as a stop token."""
    if params.constraint is None:
        return ()
    ends, stops = set(eos_token_ids), set(params.stop_token_ids)
    ignored = ends - stops if params.ignore_eos else set()
    return tuple(sorted((stops - ends) | ignored))
