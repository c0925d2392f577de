"""Starts the attempts of one request: chooses an engine, records why, sends the request."""

import asyncio
import time
from dataclasses import dataclass

from opentelemetry import trace

from services.balancer.engines.engine_view import EngineView, RoutingRequest
from services.balancer.engines.member import Dispatch, Member, Outcome
from services.balancer.queue.slots import SlotReservation
from services.balancer.request import span_attributes
from services.balancer.request.dependencies import Dependencies
from services.balancer.request.recovery import Recovery
from services.balancer.routing.decision_ledger import Decision
from services.balancer.routing.prefix_match import Matches
from services.balancer.routing.router import RoutingResult
from services.common.rpc import REQUEST_ID_KEY, remaining_s
from services.common.rpc.carrier import RunCall, RunContext
from services.common.service import telemetry

_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Attempt:
    """The request at one engine."""

    engine: EngineView
    dispatch: Dispatch
    decision: Decision
    call: RunCall
    """The call to the engine; its messages are bytes."""

    @property
    def started(self) -> bool:
        """Whether the engine has given a message."""
        return self.dispatch.started

    def end(self, outcome: Outcome, status: str) -> None:
        """Cancel the call and record how the attempt ended."""
        self.call.cancel()
        self.dispatch.end(outcome)
        self.decision.record_outcome(status)


class AttemptStarter:
    """Made per request, beside its EngineStream."""

    def __init__(
        self,
        deps: Dependencies,
        request: RoutingRequest,
        recovery: Recovery,
        context: RunContext,
        span: trace.Span,
    ) -> None:
        self._deps = deps
        self._request = request
        self._recovery = recovery
        self._context = context
        self._span = span
        self._matches: Matches | None = None

    async def start(self, reservation: SlotReservation) -> Attempt:
        """Choose an engine and send it the request.

        Raises:
            FleetError: no engine is left that may take the request.
        """
        while True:
            engines = await self._wait_for_engines()
            matches = self._matches
            if matches is None:
                matches = self._matches = await self._match(engines)
                # The match took time: the engines may have changed.
                engines = self._eligible() or engines
            routing = self._deps.router.choose(self._request, engines, matches)
            engine = routing.engine
            member = self._deps.registry.member(engine.engine_id)
            if member is not None and member.info.epoch_ms == engine.epoch_ms:
                return self._send(member, routing, matches, reservation)
            self._recovery.exclude(engine.life)

    async def _match(self, engines: list[EngineView]) -> Matches:
        parent = trace.set_span_in_context(self._span)
        return await self._deps.matcher.match(self._request, engines, parent)

    async def _wait_for_engines(self) -> list[EngineView]:
        """Engines that may take the request; waits while one may still come.

        Raises:
            FleetError: none came in time.
        """
        until = time.monotonic() + self._recovery.patience_s
        while True:
            engines = self._eligible()
            if engines:
                return engines
            if time.monotonic() >= until or not self._may_come():
                retry_after_s = self._deps.admission.retry_after_s(self._request)
                raise self._recovery.no_engine_left(retry_after_s)
            await asyncio.sleep(_POLL_S)

    def _eligible(self) -> list[EngineView]:
        recovery, router = self._recovery, self._deps.router
        excluded = recovery.excluded
        engines = router.eligible(self._request, excluded, recovery.origin)
        if engines or not excluded:
            return engines
        barred = recovery.barred(time.monotonic())
        return router.eligible(self._request, barred, recovery.origin)

    def _may_come(self) -> bool:
        """Whether waiting makes sense. A broken stream waits even for an engine to be started."""
        recovery = self._recovery
        if recovery.origin is not None:
            return recovery.origin.rule != "never"
        barred = recovery.barred()
        members = self._deps.registry.members(self._request.model)
        return any((m.info.engine_id, m.info.epoch_ms) not in barred for m in members)

    def _send(
        self, member: Member, routing: RoutingResult, matches: Matches, reservation: SlotReservation
    ) -> Attempt:
        deps, engine = self._deps, routing.engine
        prompt_tokens = len(self._request.token_ids)
        decision = self._record_decision(routing, matches)
        call = self._open_call(member, engine)
        dispatch = member.dispatch(
            uncached_tokens=max(prompt_tokens - routing.choice.candidate.matched_tokens, 1),
            blocks=-(-prompt_tokens // engine.block_size),
            slots=self._request.num_choices,
            movable=not self._recovery.recalled_once,
            cancel=call.cancel,
            on_end=deps.matcher.holds.hold(engine.life, matches.chain_for(engine)),
        )
        reservation.use()
        return Attempt(engine, dispatch, decision, call)

    def _record_decision(self, routing: RoutingResult, matches: Matches) -> Decision:
        """Write the decision to the span, the decision ledger and the metrics."""
        deps, number = self._deps, self._recovery.attempt_number
        policy = deps.router.policy_name
        span_attributes.set_decision(
            self._span, policy, routing, match_known=matches.known, attempt=number
        )
        deps.metrics.decisions.labels(policy, routing.engine.engine_id).inc()
        return deps.decisions.add(
            self._request.request_id,
            telemetry.trace_id_of(self._span),
            number,
            policy,
            routing,
            prompt_tokens=len(self._request.token_ids),
            match_known=matches.known,
        )

    def _open_call(self, member: Member, engine: EngineView) -> RunCall:
        assert member.link is not None, "every member of the registry has a link"
        metadata = (
            (REQUEST_ID_KEY, self._request.request_id),
            *telemetry.inject(trace.set_span_in_context(self._span)),
        )
        return member.link.run(
            self._recovery.request_bytes(engine),
            timeout_s=remaining_s(self._context),
            metadata=metadata,
        )
