"""What a failed attempt means: is it the engine's fault, may another engine try, what is told."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import grpc

from services.balancer.engines.member import Outcome
from services.common import errors
from services.common.errors import FleetError
from services.common.rpc.continuation import StreamLedger

_CHARGED = (errors.UnavailableError, errors.InternalError, errors.DataLossError)
_ELSEWHERE = (*_CHARGED, errors.AbortedError)
DRAINING = "DRAINING"
RECALLED = "RECALLED"
REPLACED = "REPLACED"
"""An engine took a higher attempt of the same request: whoever sent that has the stream now."""


@dataclass(frozen=True)
class Failure:
    """One attempt's end with an error."""

    error: FleetError
    lost: bool = False
    """The engine is gone or hangs, as opposed to having answered with an error of ours."""
    recalled: bool = False
    """No failure at all: the request was taken back, to begin sooner elsewhere."""

    @property
    def outcome(self) -> Outcome:
        """What the breaker is told: UNAVAILABLE, INTERNAL, DATA_LOSS and stalls are charged."""
        if self.recalled:
            return Outcome.NEUTRAL
        if isinstance(self.error, _CHARGED) and self.error.reason != DRAINING:
            return Outcome.FAULT
        return Outcome.NEUTRAL

    def elsewhere(self, *, silent: bool) -> bool:
        """Whether another engine may do better.

        Args:
            silent: this attempt had not given a message yet.
        """
        if self.lost or isinstance(self.error, _ELSEWHERE):
            return self.error.reason != REPLACED
        return silent and isinstance(self.error, errors.ResourceExhaustedError)

    def told(self, retry_after_s: float) -> FleetError:
        """The error for a client that has nothing yet, when no engine is left to try."""
        if not self.lost and not isinstance(self.error, errors.UnavailableError):
            return self.error
        return errors.UnavailableError(
            f"the engine failed and no other took the request: {self.error.message}",
            reason="NO_ENGINE" if self.lost else self.error.reason,
            metadata=self.error.metadata,
            retry_after_s=self.error.retry_after_s or retry_after_s,
        )


def of_rpc_error(error: grpc.RpcError) -> Failure:
    """Tell a dead engine from one that answered with a status of ours (those carry details)."""
    ours = any(key == errors.DETAILS_KEY for key, _ in _trailers(error))
    fleet_error = errors.error_of(error)
    if not ours and isinstance(
        fleet_error, (errors.CancelledError, errors.UnavailableError, errors.InternalError)
    ):
        # CANCELLED without details is a server that was stopped, not a client that left.
        return Failure(errors.UnavailableError(fleet_error.message), lost=True)
    return Failure(fleet_error)


def stalled(reason: str) -> Failure:
    """The registry gave the engine up under the request."""
    return Failure(errors.UnavailableError(reason, reason="ENGINE_LOST"), lost=True)


def recalled() -> Failure:
    """The request waited at a full engine while another had room."""
    error = errors.UnavailableError("it waited at a full engine", reason=RECALLED)
    return Failure(error, recalled=True)


def going_down(ledger: StreamLedger) -> FleetError:
    """The balancer itself ends the stream. UNAVAILABLE even if a part was sent: the gateway has
    that part, and another balancer can carry it on."""
    started = ledger.started
    counts = {
        "prompt_tokens": str(started.prompt_tokens if started is not None else 0),
        "completion_tokens": str(ledger.num_tokens),
    }
    return errors.UnavailableError(
        "the balancer is going down", reason=DRAINING, metadata=counts, retry_after_s=1.0
    )


def truncated() -> Failure:
    """The engine ended the stream with OK before its Summary."""
    return Failure(
        errors.InternalError("the engine ended the stream early", reason="TRUNCATED_STREAM")
    )


def _trailers(error: Any) -> Iterable[tuple[str, Any]]:
    return error.trailing_metadata() or () if hasattr(error, "trailing_metadata") else ()
