"""The failures that end a request while it waits or runs."""

from typing import NamedTuple


class Failure(NamedTuple):
    """Why a request fails: the fields of `RequestFailure` after the key."""

    code: str
    """Name of the gRPC status."""
    reason: str
    message: str
    field: str | None = None


DEADLINE_PASSED = Failure(
    "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED", "the deadline passed before the answer was complete"
)
NOT_FINITE = Failure("DATA_LOSS", "NAN_LOGITS", "the model produced values that are not finite")
NO_TOKEN_LEFT = Failure(
    "FAILED_PRECONDITION",
    "CONSTRAINT_UNSATISFIABLE",
    "the request's masks and constraints leave no token to sample",
)
CONSTRAINT_VIOLATED = Failure(
    "FAILED_PRECONDITION",
    "CONSTRAINT_UNSATISFIABLE",
    "the answer so far does not match the request's constraint",
)
