"""One request's way through the balancer: wait for a place, choose, forward, go on elsewhere.

`Exchange.run` is the whole story; whatever way it ends, `close` (idempotent) leaves the books
exact: the ticket at the engine ended, the call to it cancelled, the place at the door given back.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry import trace

from services.balancer.config import BalancerConfig
from services.balancer.engines.engine_view import Asked, EngineView
from services.balancer.engines.member import Member, Outcome, Ticket
from services.balancer.engines.registry import EngineRegistry
from services.balancer.metrics import Stats
from services.balancer.queue.admission import Admission, Grant
from services.balancer.queue.fair_queue import OUTPUT_TOKEN_WEIGHT, PROMPT_TOKEN_WEIGHT
from services.balancer.request import failure as failures
from services.balancer.request.failure import Failure
from services.balancer.request.incoming import Incoming
from services.balancer.request.recovery import Recovery
from services.balancer.routing import route_span
from services.balancer.routing.decision_ledger import Decision, DecisionLedger
from services.balancer.routing.prefix_match import Matches, PrefixMatcher
from services.balancer.routing.router import Router
from services.common import errors
from services.common.rpc import ENGINE_ID_KEY, REQUEST_ID_KEY, remaining_s
from services.common.rpc.carrier import take
from services.common.rpc.interruption import Interruption
from services.common.service import telemetry

log = logging.getLogger(__name__)

_POLL_S = 0.05


@dataclass(frozen=True)
class Rooms:
    """The balancer's rooms, as an exchange needs them."""

    config: BalancerConfig
    metadata: tuple[tuple[str, str], ...]
    registry: EngineRegistry
    admission: Admission
    matcher: PrefixMatcher
    router: Router
    decisions: DecisionLedger
    stats: Stats


@dataclass(slots=True)
class _Attempt:
    """One try at one engine."""

    engine: EngineView
    ticket: Ticket
    decision: Decision
    call: Any
    silent: bool = True


class Exchange:
    """One Run call. Built per request, used once."""

    def __init__(
        self,
        rooms: Rooms,
        incoming: Incoming,
        asked: Asked,
        context: "grpc.aio.ServicerContext[Any, Any]",
        span: trace.Span,
    ) -> None:
        self._rooms = rooms
        self._asked = asked
        self._context = context
        self._span = span
        self._recovery = Recovery(rooms.config, incoming, asked)
        self._began = time.monotonic()
        self._grant: Grant | None = None
        self._matches: Matches | None = None
        self._attempt: _Attempt | None = None
        self._interruption = Interruption()
        self.greeted = False
        """Whether the initial metadata has been sent."""
        self.revision = ""
        """Of the engine that answered first."""
        self._charged_tokens = 0

    async def run(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """The whole of it, written to the client.

        Raises:
            FleetError: what the client is told.
        """
        while True:
            attempt = await self._next()
            failure: Failure | None = None
            try:
                while messages := await take(attempt.call):
                    for raw in messages:
                        out = self._take(attempt, raw)
                        if out is not None:
                            if not self.greeted:
                                await self._greet(attempt.engine)
                            await write(out)
                if not self._recovery.ledger.complete:
                    failure = failures.truncated()
            except (grpc.RpcError, asyncio.CancelledError, errors.FleetError) as error:
                self._raise_if_cut()
                failure = _failure_of(error, attempt)
            self._end(attempt, failure)
            if failure is None or self._recovery.ledger.complete:
                return  # after the Summary there is nothing left to lose
            last = self._recover(attempt, failure)
            if last is not None:
                await write(last)
                return

    def close(self) -> None:
        """Let go of everything; idempotent, right at any moment."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.decision.outcome = "CANCELLED"
            attempt.ticket.end(Outcome.NEUTRAL)
            attempt.call.cancel()
        grant, self._grant = self._grant, None
        if grant is not None:
            summary = self._recovery.ledger.summary
            if summary is not None:
                # One message was taken for one token; now the true number is known.
                missed = summary.usage.completion_tokens - self._charged_tokens
                grant.charge(OUTPUT_TOKEN_WEIGHT * missed)
                grant.served()
            grant.leave()

    def cut(self) -> None:
        """The balancer goes down: end with a status, whatever is waited for."""
        if not self._interruption.now() and self._attempt is not None:
            self._attempt.call.cancel()

    async def _next(self) -> _Attempt:
        try:
            async with self._interruption.waiting():
                if self._grant is None:
                    self._grant = await self._enter()
                attempt = self._attempt = await self._begin()
        except TimeoutError:
            raise failures.going_down(self._recovery.ledger) from None
        return attempt

    def _raise_if_cut(self) -> None:
        ledger = self._recovery.ledger
        if self._interruption.told and not ledger.complete and not _told_to_end():
            raise failures.going_down(ledger) from None

    async def _enter(self) -> Grant:
        asked, registry = self._asked, self._rooms.registry
        if not registry.knows(asked.model) and not registry.empty:
            raise errors.NotFoundError(
                f"no engine serves model {asked.model[:128]!r}",
                reason="MODEL_NOT_FOUND",
                metadata={"model": asked.model[:128]},
            )
        grant = await self._rooms.admission.enter(asked, remaining_s(self._context))
        self._rooms.stats.queue_s.observe(time.monotonic() - self._began)
        grant.charge(PROMPT_TOKEN_WEIGHT * len(asked.token_ids))
        return grant

    async def _begin(self) -> _Attempt:
        """Choose an engine and send it the request."""
        rooms, asked = self._rooms, self._asked
        while True:
            engines = await self._candidates()
            if self._matches is None:
                parent = trace.set_span_in_context(self._span)
                self._matches = await rooms.matcher.match(asked, engines, parent)
                # That took time: look again at who is there and how busy.
                engines = self._eligible() or engines
            choice, candidates = rooms.router.choose(asked, engines, self._matches)
            engine = choice.candidate.engine
            member = rooms.registry.member(engine.engine_id)
            if member is not None and member.info.epoch_ms == engine.epoch_ms:
                break
            self._recovery.excluded.add((engine.engine_id, engine.epoch_ms))
        assert self._grant is not None
        policy, known = rooms.router.policy_name, self._matches.known
        number, prompt_tokens = self._recovery.number, len(asked.token_ids)
        route_span.describe(
            self._span, policy, choice, candidates, match_known=known, attempt=number
        )
        decision = rooms.decisions.add(
            asked.request_id,
            telemetry.trace_id_of(self._span),
            number,
            policy,
            choice,
            candidates,
            prompt_tokens=prompt_tokens,
            match_known=known,
        )
        rooms.stats.decisions.labels(policy, engine.engine_id).inc()
        call = self._open(member, engine)
        ticket = member.dispatch(
            uncached_tokens=max(prompt_tokens - choice.candidate.matched_tokens, 1),
            blocks=-(-prompt_tokens // engine.block_size),
            seats=asked.num_choices,
            on_lost=call.cancel,
        )
        life = engine.engine_id, engine.epoch_ms
        ticket.movable = not self._recovery.moved
        ticket.on_end = rooms.matcher.holds.hold(life, self._matches.chain_for(engine))
        self._grant.use()
        return _Attempt(engine, ticket, decision, call)

    def _eligible(self) -> list[EngineView]:
        recovery, router = self._recovery, self._rooms.router
        engines = router.eligible(self._asked, recovery.excluded, recovery.origin)
        if engines or not recovery.excluded:
            return engines
        barred = recovery.barred(time.monotonic())
        return router.eligible(self._asked, barred, recovery.origin)

    async def _candidates(self) -> list[EngineView]:
        """Engines that may take the request, waited for if one may yet come."""
        until = time.monotonic() + self._recovery.patience_s
        while True:
            engines = self._eligible()
            if engines:
                return engines
            if time.monotonic() >= until or not self._hope():
                raise self._recovery.nobody(self._retry_after_s())
            await asyncio.sleep(_POLL_S)

    def _hope(self) -> bool:
        """Whether waiting makes sense: a broken stream waits even for an engine to be started."""
        recovery = self._recovery
        if recovery.origin is not None:
            return recovery.origin.rule != "never"
        lives = ((m.info.engine_id, m.info.epoch_ms) for m in self._members())
        barred = recovery.barred()
        return any(life not in barred for life in lives)

    def _members(self) -> list[Member]:
        return self._rooms.registry.members(self._asked.model)

    def _open(self, member: Member, engine: EngineView) -> Any:
        """The call to the engine; its messages are bytes."""
        assert member.link is not None, "the registry's members have one"
        metadata = (
            (REQUEST_ID_KEY, self._asked.request_id),
            *telemetry.inject(trace.set_span_in_context(self._span)),
        )
        return member.link.run(
            self._recovery.request_to(engine),
            timeout_s=remaining_s(self._context),
            metadata=metadata,
        )

    def _take(self, attempt: _Attempt, raw: bytes) -> bytes | None:
        """Account for one message of the engine."""
        first = attempt.silent
        if first:
            attempt.silent, attempt.ticket.begun = False, True
            attempt.ticket.member.breaker.succeeded()
            if self._recovery.origin is not None:
                self._rooms.stats.continuations.labels("carried").inc()
        if self._grant is not None:
            self._charged_tokens += 1
            self._grant.charge(OUTPUT_TOKEN_WEIGHT)
        return self._recovery.accept(attempt.engine, raw, first=first)

    async def _greet(self, engine: EngineView) -> None:
        """Tell the caller, once, who answers."""
        self.greeted = True
        self.revision = engine.revision
        self._rooms.stats.first_message_s.observe(time.monotonic() - self._began)
        await self._context.send_initial_metadata(
            ((REQUEST_ID_KEY, self._asked.request_id), (ENGINE_ID_KEY, engine.engine_id))
        )

    def _end(self, attempt: _Attempt, failure: Failure | None) -> None:
        self._attempt = None
        attempt.call.cancel()
        attempt.ticket.end(Outcome.ANSWERED if failure is None else failure.outcome)
        attempt.decision.outcome = "OK" if failure is None else failure.error.code.name

    def _recover(self, attempt: _Attempt, failure: Failure) -> bytes | None:
        stats = self._rooms.stats
        error = failure.error
        if failure.recalled and attempt.silent:
            attempt.decision.outcome = failures.RECALLED
            self._recovery.recalled(attempt.engine)
            stats.retries.labels(failures.RECALLED).inc()
            return None
        log.warning(
            "engine %s failed: %s: %s", attempt.engine.engine_id, error.code.name, error.message
        )
        route_span.attempt_failed(self._span, attempt.engine, failure)
        last = self._recovery.failed(
            attempt.engine, failure, silent=attempt.silent, retry_after_s=self._retry_after_s()
        )
        if last is not None:
            stats.continuations.labels("closed").inc()
        else:
            stats.retries.labels(error.code.name).inc()
        return last

    def _retry_after_s(self) -> float:
        return self._rooms.admission.retry_after_s(self._asked)


def _failure_of(error: BaseException, attempt: _Attempt) -> Failure:
    """What ended the attempt; raises `error` itself if this task is to end."""
    if isinstance(error, grpc.RpcError):
        return failures.of_rpc_error(error)
    if isinstance(error, errors.FleetError):
        return Failure(error)
    if not (attempt.ticket.lost or attempt.ticket.recalled) or _told_to_end():
        raise error
    if not attempt.ticket.lost:
        return failures.recalled()
    return failures.stalled(attempt.ticket.lost)


def _told_to_end() -> bool:
    """Whether a CancelledError is meant for this task, not for the call that it reads."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
