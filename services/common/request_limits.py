"""Bounds of a request's fields, as the public contract states them (protos/inferfleet/v1).

The engine enforces them. The gateway checks the same numbers first, so that a bad request is
refused before it costs anything; the balancer needs the number of choices.
"""

import math
from typing import Any, NamedTuple

from services.common.errors import InvalidArgumentError, plain

MAX_CHOICES = 16
"""Choices of one request (`sampling.n`)."""
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_BIASED_IDS = 300
MAX_TOP_LOGPROBS = 20
MAX_INT32 = 2**31 - 1
MAX_UINT64 = 2**64 - 1


class Range(NamedTuple):
    """Values from `low` to `high`; `high` is included, `low` unless `open_low` is set."""

    low: float
    high: float
    open_low: bool = False


SAMPLING_RANGES = {
    "temperature": Range(0, 2),
    "top_p": Range(0, 1, open_low=True),
    "top_k": Range(0, MAX_INT32),
    "min_p": Range(0, 1),
    "n": Range(1, MAX_CHOICES),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "repetition_penalty": Range(0, 10, open_low=True),
}
"""Field of the contract's SamplingParams → its range."""
SEED_RANGE = Range(0, MAX_UINT64)
LOGIT_BIAS_RANGE = Range(-100, 100)
TOP_LOGPROBS_RANGE = Range(0, MAX_TOP_LOGPROBS)
MAX_TOKENS_RANGE = Range(1, MAX_INT32)


def min_tokens_range(max_tokens: int | None) -> Range:
    """The range of `stop.min_tokens`: no more than the request's own `max_tokens`."""
    return Range(0, MAX_INT32 if max_tokens is None else max_tokens)


def check_between(field: str, value: Any, bounds: Range) -> None:
    """Refuse a number outside its range, or one that is not a number (NaN).

    Args:
        field: the field's path in the contract, e.g. `sampling.temperature`.

    Raises:
        InvalidArgumentError: naming the field, its range and the value.
    """
    low, high, open_low = bounds
    below = value <= low if open_low else value < low
    if math.isnan(value) or below or value > high:
        bracket = "(" if open_low else "["
        problem = f"must be in {bracket}{low:g}, {plain(high)}], got {plain(value)}"
        raise InvalidArgumentError.for_field(field, problem)


def check_stop_strings(texts: Any) -> None:
    """Refuse too many stop strings, an empty one and one that is too long.

    Raises:
        InvalidArgumentError: naming the field and its bound.
    """
    if len(texts) > MAX_STOP_STRINGS:
        raise InvalidArgumentError.for_field(
            "stop.stop_strings", f"at most {MAX_STOP_STRINGS} strings"
        )
    for index, text in enumerate(texts):
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise InvalidArgumentError.for_field(
                f"stop.stop_strings[{index}]", f"must have 1 to {MAX_STOP_CHARS} characters"
            )


def check_logit_bias(biases: Any) -> None:
    """Refuse too many biases and one out of range.

    Args:
        biases: pairs of token id and bias; it has a length.

    Raises:
        InvalidArgumentError: naming the field and its bound.
    """
    if len(biases) > MAX_BIASED_IDS:
        raise InvalidArgumentError.for_field("sampling.logit_bias", f"at most {MAX_BIASED_IDS} ids")
    for token_id, bias in biases:
        check_between(f"sampling.logit_bias[{token_id}]", bias, LOGIT_BIAS_RANGE)
