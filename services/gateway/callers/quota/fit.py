"""Refuses requests that exceed a whole quota: waiting would not help them."""

from dataclasses import dataclass
from typing import NoReturn

from inferfleet_proto.v1 import inference_pb2
from services.common.errors import InvalidArgumentError
from services.gateway.callers.keys_file import Identity
from services.gateway.callers.quota.verdict import Scope, scopes_of

REASON = "EXCEEDS_QUOTA"


@dataclass(frozen=True)
class Need:
    """What all prompts of one HTTP body need together."""

    prompts: int
    """Each counts as a request."""
    tokens: int
    """Prompt tokens and the most output tokens."""


def check_fit(need: Need, who: Identity, request: inference_pb2.GenerateRequest) -> None:
    """Refuse a body that needs more than a quota ever allows.

    Args:
        request: one of the body's requests; decides which field the error names.

    Raises:
        InvalidArgumentError: with the reason EXCEEDS_QUOTA.
    """
    for scope in scopes_of(who):
        limits = scope.limits
        # One request always fits: limits are at least 1.
        if limits.concurrency is not None and need.prompts > limits.concurrency:
            _refuse("prompt", f"{need.prompts} prompts run at once", scope, "concurrency")
        if limits.requests_per_min is not None and need.prompts > limits.requests_per_min:
            _refuse(
                "prompt", f"{need.prompts} prompts are as many requests", scope, "requests_per_min"
            )
        if limits.tokens_per_min is not None and need.tokens > limits.tokens_per_min:
            field = "stop.max_tokens" if request.stop.HasField("max_tokens") else "prompt"
            problem = f"prompt and output may need {need.tokens} tokens"
            _refuse(field, problem, scope, "tokens_per_min")


def _refuse(field: str, problem: str, scope: Scope, quota: str) -> NoReturn:
    limit = getattr(scope.limits, quota)
    raise InvalidArgumentError.for_field(
        field,
        f"{problem}; your {scope.kind} is limited to {limit} ({quota})",
        reason=REASON,
        quota=quota,
        scope=scope.kind,
        limit=str(limit),
    )
