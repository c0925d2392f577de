"""Translates a request message into the engine's record and checks every field of it.

Field presence counts: 0 and "not set" are different. A field that the engine cannot serve is
refused by its name, never ignored.
"""

import secrets
import uuid
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from google.protobuf.message import Message

from inferfleet_proto.internal.v1 import engine_pb2
from inferfleet_proto.v1 import inference_pb2
from services.common.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from services.engine.contract.messages import CoreRequest
from services.engine.contract.sampling_params import Constraint, SamplingParams
from services.engine.grammar.constraint_check import check_constraint

MAX_REQUEST_ID_CHARS = 128
MAX_STREAM_INTERVAL = 1024
# As many as fit a message of 4 MiB, with room for what a client adds around it.
_MAX_PROMPT_LOGPROB_ENTRIES = 120_000


@dataclass(frozen=True)
class ModelFacts:
    """The facts of the model that requests are checked against; fixed once the core is ready."""

    model: str
    model_revision: str
    numerics_id: str
    vocab_size: int
    max_model_len: int
    engine_id: str = ""


class AcceptedRequest(CoreRequest, frozen=True, kw_only=True):
    """A valid request: what the core needs of it, and what the front's streams need."""

    request_id: str
    attempt: int = 0
    sent_text_bytes: tuple[int, ...] = ()
    """Per choice, the bytes of its text (UTF-8) that the client has."""
    no_text: bool = False
    echo: bool = False
    stream_interval: int = 1
    shown_token_ids: Container[int] = frozenset()
    """Special tokens whose text is part of the output."""


def translate(message: engine_pb2.EngineRequest, facts: ModelFacts) -> AcceptedRequest:
    """Check a request against the model and return the engine's record of it.

    A constraint is checked here too, except for errors that only its compilation shows.

    Raises:
        FleetError: INVALID_ARGUMENT, NOT_FOUND or FAILED_PRECONDITION, naming the field by its
            path in GenerateRequest.
    """
    request = message.request
    check_model(request.model, facts)
    if message.numerics_id and message.numerics_id != facts.numerics_id:
        raise FailedPreconditionError(
            f"this engine computes with numerics {facts.numerics_id}, the request needs "
            f"{message.numerics_id}",
            reason="NUMERICS_MISMATCH",
        )
    params = _params(request).validated(facts.vocab_size)
    prompt = _prompt(request, facts)
    continued = _continued_tokens(message.continuation, params, facts)
    _check_length(len(prompt) + max(map(len, continued), default=0), facts)
    _check_response(request.response, len(prompt))
    if params.seed is None:
        params = params.with_seed(secrets.randbits(64))
    return AcceptedRequest(
        request_id=_request_id(request.request_id),
        prompt_token_ids=prompt,
        params=params,
        tenant=message.tenant,
        salt=message.salt,
        attempt=message.attempt,
        priority=request.routing.priority,
        continued=continued,
        finished_choices=_finished_choices(message.continuation, params),
        no_text=request.response.no_text,
        sent_text_bytes=_sent_text_bytes(message.continuation, params),
        echo=request.response.echo,
        stream_interval=_given(request.response, "stream_interval", 1),
        shown_token_ids=_shown_ids(message, facts),
    )


def _shown_ids(message: engine_pb2.EngineRequest, facts: ModelFacts) -> Container[int]:
    """The special tokens whose text the caller gets."""
    if message.request.response.keep_special_tokens:
        return range(facts.vocab_size)
    return frozenset(message.shown_token_ids)


def check_model(name: str, facts: ModelFacts) -> None:
    """Check that this engine serves the model.

    Raises:
        InvalidArgumentError: the name is empty.
        NotFoundError: it is the name of another model.
    """
    if not name:
        raise InvalidArgumentError.for_field("model", "must be set")
    if name != facts.model:
        raise NotFoundError(
            f"model {name[:128]!r} is not served here (served: {facts.model})",
            reason="MODEL_NOT_FOUND",
            metadata={"model": name},
        )


def _request_id(given: str) -> str:
    if not given:
        return uuid.uuid4().hex
    if len(given) > MAX_REQUEST_ID_CHARS or not (given.isascii() and given.isprintable()):
        raise InvalidArgumentError.for_field(
            "request_id", f"must be 1 to {MAX_REQUEST_ID_CHARS} printable ASCII characters"
        )
    return given


def _prompt(request: inference_pb2.GenerateRequest, facts: ModelFacts) -> list[int]:
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidArgumentError.for_field("prompt", "must be set", reason="EMPTY_PROMPT")
    if kind != "token_ids":
        raise InvalidArgumentError.for_field(
            kind, "an engine takes token_ids only; send text and chats to the gateway"
        )
    ids = list(request.token_ids.ids)
    if not ids:
        raise InvalidArgumentError.for_field(
            "token_ids.ids", "the prompt is empty", reason="EMPTY_PROMPT"
        )
    if max(ids) >= facts.vocab_size:
        _check_length(len(ids), facts)
        _refuse_unknown_id("token_ids.ids", ids, facts.vocab_size)
    return ids


def _refuse_unknown_id(name: str, ids: Sequence[int], vocab_size: int) -> None:
    for index, token_id in enumerate(ids):
        if token_id >= vocab_size:
            raise InvalidArgumentError.for_field(
                f"{name}[{index}]",
                f"token id {token_id} is outside the vocabulary of {vocab_size}",
                reason="UNKNOWN_TOKEN_ID",
            )


def _check_length(num_tokens: int, facts: ModelFacts) -> None:
    most = facts.max_model_len - 1
    if num_tokens > most:
        raise InvalidArgumentError.for_field(
            "prompt",
            f"has {num_tokens} tokens; at most {most} leave room for one more in the context of "
            f"{facts.max_model_len} tokens",
            reason="CONTEXT_LENGTH_EXCEEDED",
            prompt_tokens=str(num_tokens),
            max_model_len=str(facts.max_model_len),
        )


def _given(message: Message, name: str, default: int) -> int:
    return int(getattr(message, name)) if message.HasField(name) else default


def _params(request: inference_pb2.GenerateRequest) -> SamplingParams:
    sampling, stop, response = request.sampling, request.stop, request.response
    given = {
        descriptor.name: value
        for descriptor, value in sampling.ListFields()
        if descriptor.has_presence
    }
    if stop.HasField("max_tokens"):
        given["max_tokens"] = stop.max_tokens
    return SamplingParams(
        **given,
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
        allowed_token_ids=tuple(sampling.allowed_token_ids),
        bad_token_ids=tuple(sampling.bad_token_ids),
        min_tokens=stop.min_tokens,
        stop_strings=tuple(stop.stop_strings),
        stop_token_ids=tuple(stop.stop_token_ids),
        ignore_eos=stop.ignore_eos,
        include_stop_in_output=stop.include_stop_in_output,
        logprobs=response.logprobs,
        top_logprobs=response.top_logprobs,
        prompt_logprobs=response.prompt_logprobs,
        cache_bypass=request.cache.bypass,
        constraint=_constraint(request),
    )


def _constraint(request: inference_pb2.GenerateRequest) -> Constraint | None:
    if not request.HasField("constraint"):
        return None
    kind = request.constraint.WhichOneof("kind")
    if kind is None:
        raise InvalidArgumentError.for_field("constraint", "must set one kind of constraint")
    value = getattr(request.constraint, kind)
    if kind == "json_object" and not value:
        raise InvalidArgumentError.for_field("constraint.json_object", "must be true")
    texts = tuple(value.texts) if kind == "choice" else ()
    constraint = Constraint(kind, value if isinstance(value, str) else "", texts)
    return replace(constraint, backend=check_constraint(constraint))


def _continued_tokens(
    continuation: engine_pb2.Continuation, params: SamplingParams, facts: ModelFacts
) -> tuple[tuple[int, ...], ...]:
    if not continuation.choices:
        return ()
    by_index: dict[int, tuple[int, ...]] = {}
    for position, choice in enumerate(continuation.choices):
        name = f"continuation.choices[{position}]"
        if choice.index >= params.n or choice.index in by_index:
            raise InvalidArgumentError.for_field(
                f"{name}.index", f"must name each of {params.n} choices at most once"
            )
        _refuse_unknown_id(f"{name}.token_ids", choice.token_ids, facts.vocab_size)
        by_index[choice.index] = tuple(choice.token_ids)
    return tuple(by_index.get(index, ()) for index in range(params.n))


def _sent_text_bytes(
    continuation: engine_pb2.Continuation, params: SamplingParams
) -> tuple[int, ...]:
    by_index = {choice.index: choice.sent_text_bytes for choice in continuation.choices}
    return tuple(by_index.get(index, 0) for index in range(params.n))


def _finished_choices(
    continuation: engine_pb2.Continuation, params: SamplingParams
) -> tuple[int, ...]:
    finished = tuple(choice.index for choice in continuation.choices if choice.finished)
    if len(finished) == params.n:
        raise InvalidArgumentError.for_field(
            "continuation.choices", "all choices are finished, so there is nothing to resume"
        )
    return finished


def _check_response(response: inference_pb2.ResponseOptions, num_prompt: int) -> None:
    if response.top_logprobs and not (response.logprobs or response.prompt_logprobs):
        raise InvalidArgumentError.for_field(
            "response.top_logprobs", "needs response.logprobs or response.prompt_logprobs"
        )
    interval = _given(response, "stream_interval", 1)
    if not 1 <= interval <= MAX_STREAM_INTERVAL:
        raise InvalidArgumentError.for_field(
            "response.stream_interval", f"must be in [1, {MAX_STREAM_INTERVAL}], got {interval}"
        )
    entries = num_prompt * (1 + response.top_logprobs)
    if response.prompt_logprobs and entries > _MAX_PROMPT_LOGPROB_ENTRIES:
        raise InvalidArgumentError.for_field(
            "response.prompt_logprobs",
            f"{entries} entries for {num_prompt} prompt tokens do not fit one message of 4 MiB "
            f"(at most {_MAX_PROMPT_LOGPROB_ENTRIES}); reduce response.top_logprobs",
        )
