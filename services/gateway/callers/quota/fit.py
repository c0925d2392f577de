"""Bodies that no waiting helps: they need more than a quota ever gives at once."""

from dataclasses import dataclass
from typing import NoReturn

from inferfleet_proto.v1 import inference_pb2
from services.common.errors import InvalidArgumentError
from services.gateway.callers.keys_file import Identity
from services.gateway.callers.quota.verdict import Scope, scopes_of

REASON = "EXCEEDS_QUOTA"


@dataclass(frozen=True)
class Need:
    """What all prompts of one body need together."""

    prompts: int
    tokens: int


def check_fit(need: Need, who: Identity, request: inference_pb2.GenerateRequest) -> None:
    """Refuse what can never be let in.

    Args:
        request: one of the body's, which tells the field to name.

    Raises:
        InvalidArgumentError
    """
    several = f"{need.prompts} prompts need {need.prompts}"
    for scope in scopes_of(who):
        limits = scope.limits
        # One request always fits: limits are at least 1.
        if limits.concurrency is not None and need.prompts > limits.concurrency:
            _refuse("prompt", f"{several} places", scope, "concurrency")
        if limits.requests_per_min is not None and need.prompts > limits.requests_per_min:
            _refuse("prompt", f"{several} requests", scope, "requests_per_min")
        if limits.tokens_per_min is not None and need.tokens > limits.tokens_per_min:
            field = "stop.max_tokens" if request.stop.HasField("max_tokens") else "prompt"
            told = f"prompt and answer may need {need.tokens} tokens"
            _refuse(field, told, scope, "tokens_per_min")


def _refuse(field: str, told: str, scope: Scope, quota: str) -> NoReturn:
    limit = getattr(scope.limits, quota)
    raise InvalidArgumentError.for_field(
        field,
        f"{told}; your {scope.kind} has {limit} ({quota})",
        reason=REASON,
        quota=quota,
        scope=scope.kind,
        limit=str(limit),
    )
