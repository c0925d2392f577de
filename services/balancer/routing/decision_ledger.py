"""Remembers the routing decisions of recent requests, so that Explain can tell where and why."""

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from inferfleet_proto.admin.v1 import fleet_pb2
from services.balancer.engines.engine_view import Candidate, Choice, Score


@dataclass(eq=False, slots=True)
class Decision:
    """One decision; `outcome` is set when its attempt has ended."""

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


@dataclass(slots=True)
class _Story:
    trace_id: str
    decisions: list[Decision]


class DecisionLedger:
    """The last `limit` requests by id; the oldest is forgotten first."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.time) -> None:
        self._limit = limit
        self._clock = clock
        self._stories: OrderedDict[str, _Story] = OrderedDict()

    def __len__(self) -> int:
        return len(self._stories)

    def add(
        self,
        request_id: str,
        trace_id: str,
        attempt: int,
        policy: str,
        choice: Choice,
        candidates: tuple[Candidate, ...],
        *,
        prompt_tokens: int,
        match_known: bool,
    ) -> Decision:
        """Note a decision; the caller sets its outcome later."""
        decision = Decision(
            attempt=attempt,
            unix_ms=int(self._clock() * 1000),
            policy=policy,
            engine_id=choice.candidate.engine.engine_id,
            reason=choice.reason,
            candidates=candidates,
            scores=choice.scores,
            prompt_tokens=prompt_tokens,
            match_known=match_known,
        )
        story = self._stories.get(request_id)
        if story is None:
            story = self._stories[request_id] = _Story(trace_id, [])
        else:
            story.trace_id = trace_id
            self._stories.move_to_end(request_id)
        story.decisions.append(decision)
        while len(self._stories) > self._limit:
            self._stories.popitem(last=False)
        return decision

    def explain(self, request_id: str) -> fleet_pb2.ExplainResponse | None:
        """All decisions of a request, oldest first; None if it is not remembered."""
        story = self._stories.get(request_id)
        if story is None:
            return None
        return fleet_pb2.ExplainResponse(
            request_id=request_id,
            trace_id=story.trace_id,
            decisions=[_to_proto(decision) for decision in story.decisions],
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
