"""Decides what follows a failed attempt of one request: another attempt, the end, or an error.

It owns the request's `StreamLedger` (what the client already has) and the set of engines that
failed. It makes no calls; `EngineStream` carries out its decisions.
"""

import time
from dataclasses import dataclass

from services.balancer.config import BalancerConfig
from services.balancer.engines.engine_view import EngineLife, EngineView, RoutingRequest
from services.balancer.queue.admission import no_engine_error
from services.balancer.request.failure import Failure
from services.balancer.request.incoming import Incoming, attempt_bytes
from services.balancer.routing.router import Origin
from services.common.errors import AbortedError, FleetError
from services.common.rpc.continuation import StreamLedger

# The load reports of a dead engine break together with its streams, so it is no candidate any more.
# An engine that is still a candidate after this time has lost the connection only.
_RECONNECT_S = 0.5


@dataclass(frozen=True)
class Retry:
    """Try again on another engine."""


@dataclass(frozen=True)
class Finish:
    """Send this last message: nothing else was missing from the stream."""

    message: bytes


@dataclass(frozen=True)
class GiveUp:
    """End the stream with this error."""

    error: FleetError


NextStep = Retry | Finish | GiveUp
"""What follows a failed attempt."""


class Recovery:
    """The attempts of one request. Made per request, beside its EngineStream."""

    def __init__(self, config: BalancerConfig, incoming: Incoming, request: RoutingRequest) -> None:
        base = incoming.request.continuation if incoming.request.HasField("continuation") else None
        self._config = config
        self._incoming = incoming
        self._request = request
        self._last_failure: Failure | None = None
        self._failures_without_progress = 0
        self._attempts = 0
        """Attempts that failed or were recalled."""
        self._excluded: set[EngineLife] = set()
        self._lost_at: dict[EngineLife, float] = {}
        self.ledger = StreamLedger(request.num_choices, base)
        self.recalled_once = False
        """Whether the request was recalled from an engine already; that happens once only."""
        self.origin: Origin | None = None
        """Set once the client has a part of the stream: only some engines may resume it."""

    @property
    def attempt_number(self) -> int:
        """Number of the next attempt, as engines see it."""
        return self._incoming.request.attempt + self._attempts

    @property
    def patience_s(self) -> float:
        """Seconds to wait for an engine that may take the request."""
        config = self._config
        return config.patience_s if self.origin is None else config.carry_on_wait_s

    @property
    def excluded(self) -> frozenset[EngineLife]:
        """Engines that failed since the stream last made progress."""
        return frozenset(self._excluded)

    def barred(self, now: float = float("inf")) -> set[EngineLife]:
        """The excluded engines that may not be tried even if no other engine is left.

        An engine that answered with an error would do so again. An engine whose connection broke
        may serve other requests well a moment later.

        Args:
            now: by time.monotonic(). By default all engines have had the time to reconnect.
        """
        lost_at = self._lost_at
        return {
            life
            for life in self._excluded
            if life not in lost_at or now - lost_at[life] < _RECONNECT_S
        }

    def exclude(self, life: EngineLife) -> None:
        """Do not try this engine again."""
        self._excluded.add(life)

    def request_bytes(self, engine: EngineView) -> bytes:
        """The serialised request for the chosen engine."""
        if not self._attempts:
            return self._incoming.raw
        numerics_id = ""
        if self.origin is not None and self.origin.rule in ("exact", "equal"):
            numerics_id = engine.numerics_id
        continuation = self.ledger.continuation()
        return attempt_bytes(self._incoming, self.attempt_number, continuation, numerics_id)

    def accept(self, engine: EngineView, raw: bytes, *, first: bool) -> bytes | None:
        """Record a message of the running attempt.

        Args:
            first: whether it is the first message of the attempt.

        Returns:
            The message for the client, or None if the client already has its content.

        Raises:
            InternalError: the engine violates the protocol.
        """
        if first and self.origin is not None:
            self.ledger.resume(exact=self.origin.exact(engine))
        out = self.ledger.accept(raw)
        if out is not None:
            self._failures_without_progress = 0
            # A long stream may outlive a failure of every engine. An engine that has recovered may
            # serve it again.
            self._excluded.clear()
            self._lost_at.clear()
        return out

    def record_failure(
        self, engine: EngineView, failure: Failure, *, started: bool, retry_after_s: float
    ) -> NextStep:
        """Record a failed attempt and decide what follows.

        Args:
            started: whether the attempt had given a message.
            retry_after_s: retry hint for the client if no engine is left.
        """
        if not failure.may_retry(started=started):
            return GiveUp(failure.error)
        self._excluded.add(engine.life)
        if failure.lost:
            self._lost_at[engine.life] = time.monotonic()
        self._attempts += 1
        self._failures_without_progress += 1
        self._last_failure = failure
        if not self.ledger.empty:
            closing = self.ledger.closing()
            if closing is not None:
                return Finish(closing)
            self._set_origin(engine)
        if self._failures_without_progress >= self._config.max_attempts:
            return GiveUp(self.no_engine_left(retry_after_s))
        return Retry()

    def record_recall(self, engine: EngineView) -> None:
        """Record that an attempt was recalled before its first message. It is no failure."""
        self._excluded.add(engine.life)
        # The engine may have the request again if no other engine is left.
        self._lost_at[engine.life] = float("-inf")
        self._attempts += 1
        self.recalled_once = True

    def no_engine_left(self, retry_after_s: float) -> FleetError:
        """The error for the client when no engine is left to try."""
        if self.ledger.has_output and not self.ledger.empty:
            return self._aborted_error()
        if self._last_failure is not None:
            return self._last_failure.client_error(retry_after_s)
        return no_engine_error(self._request.model, retry_after_s)

    def _set_origin(self, engine: EngineView) -> None:
        # Before the first token, any engine of the same weights gives the client what it expects.
        rule = self._config.carry_on if self.ledger.has_output else "any"
        first = engine if self.origin is None else self.origin.engine
        self.origin = Origin(first, rule)

    def _aborted_error(self) -> AbortedError:
        started, failure = self.ledger.started, self._last_failure
        cause = failure.error.message if failure is not None else "the engine is gone"
        return AbortedError(
            f"the stream broke after {self.ledger.num_tokens} tokens and no engine resumed it: "
            f"{cause}",
            metadata={
                "prompt_tokens": str(started.prompt_tokens if started is not None else 0),
                "completion_tokens": str(self.ledger.num_tokens),
                "attempts": str(self.attempt_number),
            },
        )
