"""Serves one request: waits for a slot, forwards the engine's stream, resumes it after a failure.

`EngineStream.run` is the whole sequence. On every exit path, `close` releases what the request
holds: the call to the engine, the request's count there, and its slots in the admission.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import grpc
from opentelemetry import trace

from services.balancer.engines.engine_view import EngineView, RoutingRequest
from services.balancer.engines.member import Outcome
from services.balancer.queue.fair_queue import OUTPUT_TOKEN_WEIGHT, PROMPT_TOKEN_WEIGHT
from services.balancer.queue.slots import SlotReservation
from services.balancer.request import span_attributes
from services.balancer.request.attempt import Attempt, AttemptStarter
from services.balancer.request.dependencies import Dependencies
from services.balancer.request.failure import (
    RECALLED,
    Failure,
    cancelled_failure,
    rpc_failure,
    shutdown_error,
    truncated_failure,
)
from services.balancer.request.incoming import Incoming
from services.balancer.request.recovery import Finish, GiveUp, NextStep, Recovery, Retry
from services.common import errors
from services.common.rpc import ENGINE_ID_KEY, REQUEST_ID_KEY, remaining_s
from services.common.rpc.carrier import RunContext, take_messages
from services.common.tasks import Interruption, cancel_requested

log = logging.getLogger(__name__)


class EngineStream:
    """One Run call. Made per request, used once."""

    def __init__(
        self,
        deps: Dependencies,
        incoming: Incoming,
        request: RoutingRequest,
        context: RunContext,
        span: trace.Span,
    ) -> None:
        self._deps = deps
        self._request = request
        self._context = context
        self._span = span
        self._recovery = Recovery(deps.config, incoming, request)
        self._starter = AttemptStarter(deps, request, self._recovery, context, span)
        self._began = time.monotonic()
        self._reservation: SlotReservation | None = None
        self._attempt: Attempt | None = None
        self._interruption = Interruption()
        self._charged_tokens = 0
        self.metadata_sent = False
        """Whether the initial metadata was sent to the client."""
        self.revision: str | None = None
        """Model revision of the engine that answered first."""

    async def run(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Serve the request to its end.

        Args:
            write: sends a message to the client.

        Raises:
            FleetError: the error that the client gets.
        """
        while True:
            attempt = await self._next_attempt()
            failure = await self._forward(attempt, write)
            self._end_attempt(attempt, failure)
            if failure is None or self._recovery.ledger.complete:
                return  # a failure after the Summary loses nothing
            step = self._recover(attempt, failure)
            if isinstance(step, GiveUp):
                raise step.error
            if isinstance(step, Finish):
                await write(step.message)
                return

    def close(self) -> None:
        """Release everything that the request holds; idempotent, safe at any moment."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.end(Outcome.NEUTRAL, "CANCELLED")
        reservation, self._reservation = self._reservation, None
        if reservation is None:
            return
        summary = self._recovery.ledger.summary
        if summary is not None:
            # Each message was charged as one token; the Summary has the true number.
            uncharged = summary.usage.completion_tokens - self._charged_tokens
            reservation.charge(OUTPUT_TOKEN_WEIGHT * uncharged)
            reservation.record_answer()
        reservation.close()

    def interrupt(self) -> None:
        """End the stream with a status at its next wait, because the balancer shuts down."""
        if not self._interruption.request() and self._attempt is not None:
            self._attempt.call.cancel()

    async def _next_attempt(self) -> Attempt:
        try:
            async with self._interruption.waiting():
                if self._reservation is None:
                    self._reservation = await self._enter()
                attempt = self._attempt = await self._starter.start(self._reservation)
        except TimeoutError:
            raise shutdown_error(self._recovery.ledger) from None
        return attempt

    async def _enter(self) -> SlotReservation:
        request, registry = self._request, self._deps.registry
        if not registry.has_served(request.model) and not registry.empty:
            raise errors.NotFoundError(
                f"no engine serves model {request.model[:128]!r}",
                reason="MODEL_NOT_FOUND",
                metadata={"model": request.model[:128]},
            )
        reservation = await self._deps.admission.enter(request, remaining_s(self._context))
        self._deps.metrics.queue_s.observe(time.monotonic() - self._began)
        reservation.charge(PROMPT_TOKEN_WEIGHT * len(request.token_ids))
        return reservation

    async def _forward(
        self, attempt: Attempt, write: Callable[[bytes], Awaitable[None]]
    ) -> Failure | None:
        """Forward the engine's messages; returns why the attempt failed, or None."""
        try:
            while messages := await take_messages(attempt.call):
                for raw in messages:
                    out = self._accept(attempt, raw)
                    if out is not None:
                        if not self.metadata_sent:
                            await self._send_metadata(attempt.engine)
                        await write(out)
        except (grpc.RpcError, asyncio.CancelledError, errors.FleetError) as error:
            self._raise_if_interrupted()
            failure = _failure_from(error, attempt)
            if failure is None:
                raise
            return failure
        return None if self._recovery.ledger.complete else truncated_failure()

    def _accept(self, attempt: Attempt, raw: bytes) -> bytes | None:
        """Record one message of the engine; returns the message for the client, if any."""
        first = not attempt.started
        if first:
            attempt.dispatch.mark_started()
            if self._recovery.origin is not None:
                self._deps.metrics.continuations.labels("carried").inc()
        if self._reservation is not None:
            self._charged_tokens += 1
            self._reservation.charge(OUTPUT_TOKEN_WEIGHT)
        return self._recovery.accept(attempt.engine, raw, first=first)

    async def _send_metadata(self, engine: EngineView) -> None:
        """Send the initial metadata, once: it names the engine that answers."""
        self.metadata_sent = True
        self.revision = engine.revision
        self._deps.metrics.first_message_s.observe(time.monotonic() - self._began)
        await self._context.send_initial_metadata(
            ((REQUEST_ID_KEY, self._request.request_id), (ENGINE_ID_KEY, engine.engine_id))
        )

    def _raise_if_interrupted(self) -> None:
        ledger = self._recovery.ledger
        if self._interruption.requested and not ledger.complete and not cancel_requested():
            raise shutdown_error(ledger) from None

    def _end_attempt(self, attempt: Attempt, failure: Failure | None) -> None:
        self._attempt = None
        if failure is None:
            attempt.end(Outcome.ANSWERED, "OK")
        else:
            recalled = failure.recalled and not attempt.started
            attempt.end(failure.outcome, RECALLED if recalled else failure.error.code.name)

    def _recover(self, attempt: Attempt, failure: Failure) -> NextStep:
        """Decide what follows the failed attempt, and record the decision."""
        metrics, error = self._deps.metrics, failure.error
        if failure.recalled and not attempt.started:
            self._recovery.record_recall(attempt.engine)
            metrics.retries.labels(RECALLED).inc()
            return Retry()
        engine_id = attempt.engine.engine_id
        if failure.refused:
            log.info("engine %s refused: %s: %s", engine_id, error.code.name, failure.log_text)
        else:
            log.warning("engine %s failed: %s: %s", engine_id, error.code.name, error.message)
        span_attributes.add_failure(self._span, attempt.engine, failure)
        step = self._recovery.record_failure(
            attempt.engine,
            failure,
            started=attempt.started,
            retry_after_s=self._deps.admission.retry_after_s(self._request),
        )
        if isinstance(step, Finish):
            metrics.continuations.labels("closed").inc()
        elif isinstance(step, Retry):
            metrics.retries.labels(error.code.name).inc()
        return step


def _failure_from(error: BaseException, attempt: Attempt) -> Failure | None:
    """Why the attempt failed; None if the error ends this task and not only the attempt."""
    if isinstance(error, grpc.RpcError):
        return rpc_failure(error)
    if isinstance(error, errors.FleetError):
        return Failure(error)
    if cancel_requested():
        return None
    return cancelled_failure(attempt.dispatch)
