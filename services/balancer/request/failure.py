"""What a failed attempt means: whether the engine is at fault, whether another engine may try, and
which error the client gets."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import grpc

from services.balancer.engines.member import Dispatch, Outcome
from services.common import errors
from services.common.errors import FleetError
from services.common.rpc.continuation import StreamLedger

_ENGINE_FAULTS = (errors.UnavailableError, errors.InternalError, errors.DataLossError)
_RETRIABLE = (*_ENGINE_FAULTS, errors.AbortedError)
_ENDED = (errors.AbortedError, errors.CancelledError, errors.DeadlineExceededError)
DRAINING = "DRAINING"
RECALLED = "RECALLED"
REPLACED = "REPLACED"
"""The engine took a higher attempt of the same request: the sender of that attempt has the stream
now."""


@dataclass(frozen=True)
class Failure:
    """The end of an attempt with an error."""

    error: FleetError
    lost: bool = False
    """The engine is gone or hangs. False: it answered with an error of ours."""
    recalled: bool = False
    """Not a failure: the request was recalled, to start sooner on another engine."""

    @property
    def outcome(self) -> Outcome:
        """The outcome for the breaker. UNAVAILABLE, INTERNAL, DATA_LOSS and stalls are faults."""
        if self.recalled:
            return Outcome.NEUTRAL
        if isinstance(self.error, _ENGINE_FAULTS) and self.error.reason != DRAINING:
            return Outcome.FAULT
        return Outcome.NEUTRAL

    @property
    def refused(self) -> bool:
        """The engine works: it answered that it does not take this request, or not now."""
        return not self.lost and not isinstance(self.error, (*_ENGINE_FAULTS, *_ENDED))

    @property
    def log_text(self) -> str:
        """What logs and traces say: a refusal's message may quote text of the caller, its fields do
        not."""
        if not self.refused:
            return self.error.message
        fields = ", ".join(violation.field for violation in self.error.violations)
        return f"{self.error.reason} {fields}".rstrip()

    def may_retry(self, *, started: bool) -> bool:
        """Whether another engine may succeed.

        Args:
            started: whether this attempt had given a message.
        """
        if self.lost or isinstance(self.error, _RETRIABLE):
            return self.error.reason != REPLACED
        return not started and isinstance(self.error, errors.ResourceExhaustedError)

    def client_error(self, retry_after_s: float) -> FleetError:
        """The error for a client without any output, when no engine is left to try."""
        if not self.lost and not isinstance(self.error, errors.UnavailableError):
            return self.error
        return errors.UnavailableError(
            f"the engine failed and no other engine took the request: {self.error.message}",
            reason="NO_ENGINE" if self.lost else self.error.reason,
            metadata=self.error.metadata,
            retry_after_s=self.error.retry_after_s or retry_after_s,
        )


def rpc_failure(error: grpc.RpcError) -> Failure:
    """Distinguish a dead engine from one that answered with a status of ours, which has details."""
    ours = any(key == errors.DETAILS_KEY for key, _ in _trailers(error))
    fleet_error = errors.error_of(error)
    if not ours and isinstance(
        fleet_error, (errors.CancelledError, errors.UnavailableError, errors.InternalError)
    ):
        # CANCELLED without details comes from a server that was stopped, not from a client.
        return Failure(errors.UnavailableError(fleet_error.message), lost=True)
    return Failure(fleet_error)


def cancelled_failure(dispatch: Dispatch) -> Failure | None:
    """Why the balancer itself cancelled the call to the engine; None if it did not."""
    if dispatch.lost_reason is not None:
        error = errors.UnavailableError(dispatch.lost_reason, reason="ENGINE_LOST")
        return Failure(error, lost=True)
    if dispatch.recalled:
        error = errors.UnavailableError(
            "recalled: the request waited at a full engine while another had a free slot",
            reason=RECALLED,
        )
        return Failure(error, recalled=True)
    return None


def truncated_failure() -> Failure:
    """The engine ended the stream with OK before its Summary."""
    return Failure(
        errors.InternalError(
            "the engine ended the stream before its summary", reason="TRUNCATED_STREAM"
        )
    )


def shutdown_error(ledger: StreamLedger) -> FleetError:
    """The error of a stream that the balancer ends because it shuts down.

    UNAVAILABLE even if the client has a part: the gateway has that part too, and can resume the
    stream through another balancer.
    """
    started = ledger.started
    counts = {
        "prompt_tokens": str(started.prompt_tokens if started is not None else 0),
        "completion_tokens": str(ledger.num_tokens),
    }
    return errors.UnavailableError(
        "the balancer is shutting down", reason=DRAINING, metadata=counts, retry_after_s=1.0
    )


def _trailers(error: Any) -> Iterable[tuple[str, Any]]:
    return error.trailing_metadata() or () if hasattr(error, "trailing_metadata") else ()
