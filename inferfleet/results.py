"""The immutable records that calls return. Names and meanings are the contract's."""

from collections.abc import Iterable
from dataclasses import dataclass

from inferfleet_proto.v1 import inference_pb2 as pb


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token and its log probability; `token` is its bytes, perhaps part of a character."""

    token_id: int
    logprob: float | None
    token: bytes
    top: tuple["TokenLogprob", ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """First event of a stream: the request has begun to run."""

    request_id: str
    model: str
    model_revision: str
    prompt_tokens: int
    cached_tokens: int
    seed: int
    engine_id: str
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call. A Delta holds a piece of one; only the first piece has id and name."""

    index: int
    id: str
    name: str
    arguments: str
    """JSON text."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New output of one choice; `text` is empty while the text of the tokens is held back."""

    choice: int
    text: str
    reasoning: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    tool_call: ToolCall | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """One choice has ended.

    `reason` is EOS, STOP_TOKEN, STOP_STRING, MAX_TOKENS, CONTEXT_FULL or GRAMMAR_COMPLETE.
    """

    choice: int
    reason: str
    matched: str | int | None = None
    """The stop string or stop token that ended the choice, if one did."""


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Times in seconds, measured at the engine."""

    queued_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Last event of a stream."""

    usage: Usage
    timings: Timings
    engine_id: str
    continuations: int
    exact: bool


Event = Started | Delta | Finished | Summary


@dataclass(frozen=True, slots=True)
class Choice:
    index: int
    text: str
    reasoning: str
    token_ids: tuple[int, ...]
    finished: Finished
    logprobs: tuple[TokenLogprob, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    request_id: str
    model: str
    model_revision: str
    seed: int
    choices: tuple[Choice, ...]
    summary: Summary
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    revision: str
    max_model_len: int
    vocab_size: int
    num_engines: int
    created_unix_s: int


@dataclass(frozen=True, slots=True)
class Tokens:
    token_ids: tuple[int, ...]
    rendered: str
    """The text that was tokenised: the rendered template for messages."""


def event_of(message: pb.GenerateResponse) -> Event | None:
    """Convert a stream message; None for an event kind that this version does not know."""
    kind = message.WhichOneof("event")
    if kind == "delta":
        return _delta(message.delta)
    if kind == "started":
        return _started(message.started)
    if kind == "finished":
        return _finished(message.finished)
    return _summary(message.summary) if kind == "summary" else None


def completion_of(message: pb.CompleteResponse) -> Completion:
    """Convert a whole answer."""
    return Completion(
        request_id=message.request_id,
        model=message.model,
        model_revision=message.model_revision,
        seed=message.seed,
        choices=tuple(_choice(choice) for choice in message.choices),
        summary=_summary(message.summary),
        prompt_logprobs=_logprobs(message.prompt_logprobs),
    )


def models_of(message: pb.ListModelsResponse) -> tuple[Model, ...]:
    """Convert a listing of models."""
    return tuple(
        Model(m.name, m.revision, m.max_model_len, m.vocab_size, m.num_engines, m.created_unix_s)
        for m in message.models
    )


def _started(event: pb.Started) -> Started:
    return Started(
        request_id=event.request_id,
        model=event.model,
        model_revision=event.model_revision,
        prompt_tokens=event.prompt_tokens,
        cached_tokens=event.cached_tokens,
        seed=event.seed,
        engine_id=event.engine_id,
        prompt_logprobs=_logprobs(event.prompt_logprobs),
    )


def _delta(event: pb.Delta) -> Delta:
    return Delta(
        choice=event.choice,
        text=event.text,
        reasoning=event.reasoning,
        token_ids=tuple(event.token_ids),
        logprobs=_logprobs(event.logprobs),
        tool_call=_tool_call(event.tool_call) if event.HasField("tool_call") else None,
    )


def _tool_call(call: pb.ToolCall) -> ToolCall:
    return ToolCall(call.index, call.id, call.name, call.arguments)


def _finished(event: pb.Finished) -> Finished:
    try:
        reason = pb.FinishReason.Name(event.reason).removeprefix("FINISH_REASON_")
    except ValueError:  # a reason that only newer servers know
        reason = str(event.reason)
    matched = event.WhichOneof("matched")
    return Finished(event.choice, reason, getattr(event, matched) if matched else None)


def _summary(event: pb.Summary) -> Summary:
    usage, timings = event.usage, event.timings
    return Summary(
        usage=Usage(
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            usage.reasoning_tokens,
        ),
        timings=Timings(timings.queued_s, timings.prefill_s, timings.decode_s),
        engine_id=event.engine_id,
        continuations=event.continuations,
        exact=event.exact,
    )


def _choice(choice: pb.Choice) -> Choice:
    return Choice(
        index=choice.index,
        text=choice.text,
        reasoning=choice.reasoning,
        token_ids=tuple(choice.token_ids),
        finished=_finished(choice.finished),
        logprobs=_logprobs(choice.logprobs),
        tool_calls=tuple(map(_tool_call, choice.tool_calls)),
    )


def _logprobs(tokens: Iterable[pb.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            token_id=token.token_id,
            logprob=token.logprob if token.HasField("logprob") else None,
            token=token.token,
            top=_logprobs(token.top),
        )
        for token in tokens
    )
