"""Writes to the `route` span: attributes for the decision, an event for each failed attempt."""

from opentelemetry import trace

from services.balancer.engines.engine_view import Candidate, EngineView
from services.balancer.request.failure import Failure
from services.balancer.routing.router import RoutingResult


def set_decision(
    span: trace.Span, policy: str, routing: RoutingResult, *, match_known: bool, attempt: int
) -> None:
    """Write the candidates with their matches and scores, the chosen engine and the reason."""
    if not span.is_recording():
        return
    choice, candidates = routing
    scored = [c.engine.engine_id for c in candidates if c.engine.engine_id in choice.scores]
    span.set_attributes(
        {
            "inferfleet.route.policy": policy,
            "inferfleet.route.candidates": [c.engine.engine_id for c in candidates],
            "inferfleet.route.matched_blocks": [_matched_blocks(c) for c in candidates],
            "inferfleet.route.scores_s": [choice.scores[e].expected_s for e in scored],
            "inferfleet.route.engine_id": choice.candidate.engine.engine_id,
            "inferfleet.route.engine_matched_blocks": _matched_blocks(choice.candidate),
            "inferfleet.route.reason": choice.reason,
            "inferfleet.route.match_known": match_known,
            "inferfleet.route.attempt": attempt,
        }
    )


def add_failure(span: trace.Span, engine: EngineView, failure: Failure) -> None:
    """Add an event for an engine that failed, or that refused the request."""
    span.add_event(
        "attempt refused" if failure.refused else "attempt failed",
        {
            "inferfleet.engine_id": engine.engine_id,
            "inferfleet.status": failure.error.code.name,
            "inferfleet.message": failure.log_text[:256],
        },
    )


def _matched_blocks(candidate: Candidate) -> int:
    return candidate.matched_tokens // max(candidate.engine.block_size, 1)
