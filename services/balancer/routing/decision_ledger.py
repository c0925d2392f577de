"""Keeps the routing decisions of recent requests for the operators' Explain call."""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from inferfleet_proto.admin.v1 import fleet_pb2
from services.balancer.engines.engine_view import Candidate, Score
from services.balancer.routing.router import RoutingResult


@dataclass(eq=False, slots=True)
class Decision:
    """One decision."""

    attempt: int
    unix_ms: int
    policy: str
    engine_id: str
    reason: str
    candidates: tuple[Candidate, ...]
    scores: Mapping[str, Score]
    prompt_tokens: int
    match_known: bool
    outcome: str = ""
    """How the attempt ended; empty while it runs."""

    def record_outcome(self, outcome: str) -> None:
        """Record how the attempt ended: OK, or the name of a status."""
        self.outcome = outcome


@dataclass(slots=True)
class _RequestHistory:
    trace_id: str
    decisions: list[Decision]


class DecisionLedger:
    """The last `limit` requests by id. The one whose last decision is oldest is dropped first.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.time) -> None:
        self._limit = limit
        self._clock = clock
        self._histories: OrderedDict[str, _RequestHistory] = OrderedDict()

    def __len__(self) -> int:
        return len(self._histories)

    def add(
        self,
        request_id: str,
        trace_id: str,
        attempt: int,
        policy: str,
        routing: RoutingResult,
        *,
        prompt_tokens: int,
        match_known: bool,
    ) -> Decision:
        """Add a decision; the caller records its outcome later.

        Args:
            attempt: number of the attempt, as engines see it.
            match_known: whether the prefix index answered.
        """
        choice = routing.choice
        decision = Decision(
            attempt=attempt,
            unix_ms=int(self._clock() * 1000),
            policy=policy,
            engine_id=routing.engine.engine_id,
            reason=choice.reason,
            candidates=routing.candidates,
            scores=choice.scores,
            prompt_tokens=prompt_tokens,
            match_known=match_known,
        )
        history = self._histories.get(request_id)
        if history is None:
            history = self._histories[request_id] = _RequestHistory(trace_id, [])
        else:
            history.trace_id = trace_id
            self._histories.move_to_end(request_id)
        history.decisions.append(decision)
        while len(self._histories) > self._limit:
            self._histories.popitem(last=False)
        return decision

    def explain(self, request_id: str) -> fleet_pb2.ExplainResponse | None:
        """All decisions of a request, oldest first; None if the request is not kept."""
        history = self._histories.get(request_id)
        if history is None:
            return None
        return fleet_pb2.ExplainResponse(
            request_id=request_id,
            trace_id=history.trace_id,
            decisions=[_to_proto(decision) for decision in history.decisions],
        )


def _to_proto(decision: Decision) -> fleet_pb2.Decision:
    candidates = []
    for candidate in decision.candidates:
        score = decision.scores.get(candidate.engine.engine_id)
        candidates.append(
            fleet_pb2.Candidate(
                engine_id=candidate.engine.engine_id,
                matched_tokens=candidate.matched_tokens,
                expected_s=score.expected_s if score else 0.0,
                parts=dict(score.parts) if score else {},
            )
        )
    return fleet_pb2.Decision(
        attempt=decision.attempt,
        unix_ms=decision.unix_ms,
        policy=decision.policy,
        engine_id=decision.engine_id,
        reason=decision.reason,
        candidates=candidates,
        outcome=decision.outcome,
        prompt_tokens=decision.prompt_tokens,
        match_known=decision.match_known,
    )
