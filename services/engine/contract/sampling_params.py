"""All request semantics of the engine, validated once; immutable afterwards.

The proto's `SamplingParams`, `StopParams` and `ResponseOptions` in one record, with the documented
defaults filled in. Field names and bounds are the contract's (protos/inferfleet/v1).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self

from services.common.errors import InvalidArgumentError, plain
from services.engine.contract import param_types

MAX_CHOICES = 16
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_BIASED_IDS = 300
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the output must look like: the kind is the name of the proto's `oneof` field."""

    kind: str
    text: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request draws its tokens and when it stops.

    Raises:
        InvalidArgumentError: a value of a wrong type, by its field's path in the proto. Ranges are
            checked by `validated`.
    """

    temperature: float = 1.0
    """[0, 2]; 0 is the arg-max, lowest id on ties."""
    top_p: float = 1.0
    """(0, 1]; 1 is off."""
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    """[0, 1]; 0 is off."""
    seed: int | None = None
    """Unsigned 64 bits. None only until the request is added: then one is drawn for it alone."""
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of token id and bias, sorted by id; may be given as a dict."""
    allowed_token_ids: tuple[int, ...] = ()
    bad_token_ids: tuple[int, ...] = ()
    max_tokens: int | None = None
    """None: what is left of the context."""
    min_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    """Found by the front process, which owns the text; the core never sees text. May be given as
    one text."""
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

    def validated(self, vocab_size: int) -> Self:
        """Return self if every field is in range.

        Raises:
            InvalidArgumentError: naming the first field at fault by its path in the proto.
        """
        self._check_draw()
        self._check_penalties()
        self._check_stops()
        self._check_ids(vocab_size)
        return self

    def with_seed(self, seed: int) -> Self:
        """The same parameters with the noise fixed."""
        return replace(self, seed=seed)

    def _check_draw(self) -> None:
        _between("sampling.temperature", self.temperature, 0, 2)
        _between("sampling.top_p", self.top_p, 0, 1, open_low=True)
        _between("sampling.top_k", self.top_k, 0, 2**31 - 1)
        _between("sampling.min_p", self.min_p, 0, 1)
        _between("sampling.n", self.n, 1, MAX_CHOICES)
        if self.seed is not None:
            _between("sampling.seed", self.seed, 0, 2**64 - 1)
        _between("response.top_logprobs", self.top_logprobs, 0, MAX_TOP_LOGPROBS)

    def _check_penalties(self) -> None:
        _between("sampling.presence_penalty", self.presence_penalty, -2, 2)
        _between("sampling.frequency_penalty", self.frequency_penalty, -2, 2)
        _between("sampling.repetition_penalty", self.repetition_penalty, 0, 10, open_low=True)
        if len(self.logit_bias) > MAX_BIASED_IDS:
            _refuse("sampling.logit_bias", f"at most {MAX_BIASED_IDS} ids")
        for token_id, bias in self.logit_bias:
            _between(f"sampling.logit_bias[{token_id}]", bias, -100, 100)

    def _check_stops(self) -> None:
        if self.max_tokens is not None:
            _between("stop.max_tokens", self.max_tokens, 1, 2**31 - 1)
        _between("stop.min_tokens", self.min_tokens, 0, self.max_tokens or 2**31 - 1)
        if len(self.stop_strings) > MAX_STOP_STRINGS:
            _refuse("stop.stop_strings", f"at most {MAX_STOP_STRINGS} strings")
        for index, text in enumerate(self.stop_strings):
            if not 1 <= len(text) <= MAX_STOP_CHARS:
                _refuse(
                    f"stop.stop_strings[{index}]", f"must have 1 to {MAX_STOP_CHARS} characters"
                )

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


def _between(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    below = value <= low if open_low else value < low
    if math.isnan(value) or below or value > high:
        bracket = "(" if open_low else "["
        _refuse(name, f"must be in {bracket}{low:g}, {plain(high)}], got {plain(value)}")


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
