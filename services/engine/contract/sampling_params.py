"""`SamplingParams`: how one request draws its tokens and when it stops.

One immutable record holds the proto's `SamplingParams`, `StopParams` and `ResponseOptions` with the
documented defaults filled in. Field names are the contract's (protos/inferfleet/v1); the bounds are
in `services/common/request_limits.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self

from services.common import request_limits
from services.common.errors import InvalidArgumentError
from services.engine.contract import param_types


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the output must look like."""

    kind: str
    """Name of the proto's `oneof` field, e.g. `json_schema`."""
    text: str
    """The schema, expression or grammar; empty for `json_object` and `choice`."""
    choices: tuple[str, ...] = ()
    """With kind `choice`: the allowed answers."""
    backend: str | None = field(default=None, compare=False)
    """The grammar engine that the check chose, for the trace; None before the check."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request draws its tokens and when it stops.

    The constructor checks types; `validated` checks ranges.

    Raises:
        InvalidArgumentError: a value has the wrong type; the error names the field's path in the
            proto.
    """

    temperature: float = 1.0
    """[0, 2]; 0 is the arg-max, lowest id on ties."""
    top_p: float = 1.0
    """(0, 1]; 1 is off."""
    top_k: int = 0
    """Number of likeliest tokens kept; 0 is off."""
    min_p: float = 0.0
    """[0, 1]; 0 is off."""
    seed: int | None = None
    """Unsigned 64 bits. None until the request is added; then a random seed is drawn for it."""
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of token id and bias, sorted by id. A dict is accepted."""
    allowed_token_ids: tuple[int, ...] = ()
    bad_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    """None: as many as the context has room for."""
    min_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    """The front process finds them; the core handles tokens only. A single string is accepted."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_in_output: bool = False
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_logprobs: bool = False
    cache_bypass: bool = False
    constraint: Constraint | None = field(default=None)

    def __post_init__(self) -> None:
        for name, path, typed in _TYPES:
            given = getattr(self, name)
            if given is None and name in _OPTIONAL:
                continue
            value = typed(path, given)
            if value is not given:
                object.__setattr__(self, name, value)
        if not isinstance(self.constraint, Constraint | None):
            got = type(self.constraint).__name__
            _refuse("constraint", f"must be a Constraint or None, got {got}")

    @property
    def has_penalty(self) -> bool:
        """Whether drawing a token depends on the tokens before it."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    def validated(self, vocab_size: int) -> Self:
        """Return self if every field is in range.

        Raises:
            InvalidArgumentError: naming the first field at fault by its path in the proto.
        """
        for name, bounds in request_limits.SAMPLING_RANGES.items():
            request_limits.check_between(f"sampling.{name}", getattr(self, name), bounds)
        if self.seed is not None:
            request_limits.check_between("sampling.seed", self.seed, request_limits.SEED_RANGE)
        request_limits.check_between(
            "response.top_logprobs", self.top_logprobs, request_limits.TOP_LOGPROBS_RANGE
        )
        request_limits.check_logit_bias(self.logit_bias)
        self._check_stops()
        self._check_ids(vocab_size)
        return self

    def with_seed(self, seed: int) -> Self:
        """The same parameters with the noise fixed."""
        return replace(self, seed=seed)

    def _check_stops(self) -> None:
        if self.max_tokens is not None:
            request_limits.check_between(
                "stop.max_tokens", self.max_tokens, request_limits.MAX_TOKENS_RANGE
            )
        request_limits.check_between(
            "stop.min_tokens", self.min_tokens, request_limits.min_tokens_range(self.max_tokens)
        )
        request_limits.check_stop_strings(self.stop_strings)

    def _check_ids(self, vocab_size: int) -> None:
        named = (
            ("sampling.logit_bias", [token_id for token_id, _ in self.logit_bias]),
            ("sampling.allowed_token_ids", self.allowed_token_ids),
            ("sampling.bad_token_ids", self.bad_token_ids),
            ("stop.stop_token_ids", self.stop_token_ids),
        )
        for name, ids in named:
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    _refuse(name, f"token id {token_id} is outside the vocabulary of {vocab_size}")


def _refuse(name: str, problem: str) -> None:
    raise InvalidArgumentError.for_field(name, problem)


_OPTIONAL = frozenset({"seed", "max_tokens"})
_TYPES: tuple[tuple[str, str, Callable[[str, object], object]], ...] = (
    ("temperature", "sampling.temperature", param_types.number),
    ("top_p", "sampling.top_p", param_types.number),
    ("top_k", "sampling.top_k", param_types.integer),
    ("min_p", "sampling.min_p", param_types.number),
    ("seed", "sampling.seed", param_types.integer),
    ("n", "sampling.n", param_types.integer),
    ("presence_penalty", "sampling.presence_penalty", param_types.number),
    ("frequency_penalty", "sampling.frequency_penalty", param_types.number),
    ("repetition_penalty", "sampling.repetition_penalty", param_types.number),
    ("logit_bias", "sampling.logit_bias", param_types.biases),
    ("allowed_token_ids", "sampling.allowed_token_ids", param_types.token_ids),
    ("bad_token_ids", "sampling.bad_token_ids", param_types.token_ids),
    ("max_tokens", "stop.max_tokens", param_types.integer),
    ("min_tokens", "stop.min_tokens", param_types.integer),
    ("stop_strings", "stop.stop_strings", param_types.texts),
    ("stop_token_ids", "stop.stop_token_ids", param_types.token_ids),
    ("ignore_eos", "stop.ignore_eos", param_types.flag),
    ("include_stop_in_output", "stop.include_stop_in_output", param_types.flag),
    ("logprobs", "response.logprobs", param_types.flag),
    ("top_logprobs", "response.top_logprobs", param_types.integer),
    ("prompt_logprobs", "response.prompt_logprobs", param_types.flag),
    ("cache_bypass", "cache.bypass", param_types.flag),
)
