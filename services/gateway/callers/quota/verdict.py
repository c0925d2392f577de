"""The result of counting a request, and how a caller sees it: as an error and as headers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from services.common.errors import AlreadyExistsError, FleetError, ResourceExhaustedError
from services.gateway.callers.keys_file import Identity, Limits

DUPLICATE = "duplicate"
_UNITS = {
    "requests_per_min": "requests per minute",
    "tokens_per_min": "tokens per minute",
    "concurrency": "requests at once",
}


@dataclass(frozen=True)
class Scope:
    """A holder of limits: a tenant, or one of its keys."""

    kind: str
    """"tenant" or "key"."""
    name: str
    """Part of the names of keys in Redis; unique within the tenant."""
    limits: Limits


@dataclass(frozen=True)
class Left:
    """What remains of one scope's quotas; None where there is no limit."""

    requests: float | None = None
    tokens: float | None = None


@dataclass(frozen=True)
class Verdict:
    """The decision on one request."""

    refused: str | None
    """The quota that is used up, or DUPLICATE; None if admitted."""
    scope: int
    """Index of the scope that refused."""
    wait_s: float
    """Estimated seconds until the quota allows the request."""
    left: Sequence[Left]
    """Per scope; empty for a duplicate."""


def scopes_of(who: Identity) -> tuple[Scope, ...]:
    """The tenant, and the key if it has limits of its own."""
    tenant = Scope("tenant", "t", who.tenant_limits)
    if not who.key_limits.any:
        return (tenant,)
    return tenant, Scope("key", f"k:{who.key_id}", who.key_limits)


def refusal(verdict: Verdict, who: Identity, request_id: str, tokens: int) -> FleetError:
    """The error for a refused caller.

    Args:
        tokens: that were to be reserved.
    """
    assert verdict.refused is not None
    if verdict.refused == DUPLICATE:
        return AlreadyExistsError(f"request id {request_id} is in flight at another gateway")
    scope = scopes_of(who)[verdict.scope]
    limit = getattr(scope.limits, verdict.refused)
    whose = f"tenant {who.tenant}" if scope.kind == "tenant" else f"key {who.key_id}"
    message = f"quota {verdict.refused} of {whose} is used up: {limit} {_UNITS[verdict.refused]}"
    left = verdict.left[verdict.scope].tokens
    if verdict.refused == "tokens_per_min" and left is not None:
        message += f"; requested {tokens}, left {max(math.floor(left), 0)}"
    return ResourceExhaustedError(
        message,
        reason="RATE_LIMIT_EXCEEDED",
        metadata={
            "quota": verdict.refused,
            "scope": scope.kind,
            "limit": str(limit),
            **headers_of(who, verdict.left),
        },
        # Rounded up to whole milliseconds, so that a caller that waits this long is not too early.
        retry_after_s=max(math.ceil(verdict.wait_s * 1000), 1) / 1000,
    )


def headers_of(who: Identity, left: Sequence[Left]) -> dict[str, str]:
    """x-ratelimit-* headers as OpenAI's clients read them, of the scope with the least left."""
    headers: dict[str, str] = {}
    for name, field in (("requests", "requests_per_min"), ("tokens", "tokens_per_min")):
        known = [
            (getattr(one, name), getattr(scope.limits, field))
            for scope, one in zip(scopes_of(who), left, strict=False)
            if getattr(one, name) is not None
        ]
        if known:
            have, limit = min(known)
            headers[f"x-ratelimit-limit-{name}"] = str(limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(max(math.floor(have), 0))
            full_s = max(limit - have, 0) * 60 / limit
            headers[f"x-ratelimit-reset-{name}"] = f"{math.ceil(full_s * 1000)}ms"
    return headers
