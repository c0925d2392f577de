"""A routing decision in the trace: attributes of the `route` span, an event per failure."""

from opentelemetry import trace

from services.balancer.engines.engine_view import Candidate, Choice, EngineView
from services.balancer.request.failure import Failure


def describe(
    span: trace.Span,
    policy: str,
    choice: Choice,
    candidates: tuple[Candidate, ...],
    *,
    match_known: bool,
    attempt: int,
) -> None:
    """Write who could have served, what each holds and costs, who was chosen and why."""
    if not span.is_recording():
        return
    scored = [c.engine.engine_id for c in candidates if c.engine.engine_id in choice.scores]
    span.set_attributes(
        {
            "inferfleet.route.policy": policy,
            "inferfleet.route.candidates": [c.engine.engine_id for c in candidates],
            "inferfleet.route.matched_blocks": [_blocks(c) for c in candidates],
            "inferfleet.route.scores_s": [choice.scores[e].expected_s for e in scored],
            "inferfleet.route.engine_id": choice.candidate.engine.engine_id,
            "inferfleet.route.engine_matched_blocks": _blocks(choice.candidate),
            "inferfleet.route.reason": choice.reason,
            "inferfleet.route.match_known": match_known,
            "inferfleet.route.attempt": attempt,
        }
    )


def attempt_failed(span: trace.Span, engine: EngineView, failure: Failure) -> None:
    """Note that an engine failed and why."""
    span.add_event(
        "attempt failed",
        {
            "inferfleet.engine_id": engine.engine_id,
            "inferfleet.status": failure.error.code.name,
            "inferfleet.message": failure.error.message[:256],
        },
    )


def _blocks(candidate: Candidate) -> int:
    return candidate.matched_tokens // max(candidate.engine.block_size, 1)
