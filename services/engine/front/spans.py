"""The engine's spans of a trace: `run` and, below it, one span per step, from the core's marks."""

from collections.abc import Iterable

import grpc
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode

from services.common.errors import FleetError
from services.engine.contract.messages import Mark
from services.engine.front.load_report import LoadState
from services.engine.front.request_stream import RequestStream
from services.engine.front.request_translation import AcceptedRequest, ModelFacts

# A long prompt can have thousands of chunks; the SDK keeps 128 events per span.
_MAX_EVENTS = 120


class RequestSpans:
    """Makes the spans of the engine's requests."""

    def __init__(self, tracer: trace.Tracer, facts: ModelFacts, load_state: LoadState) -> None:
        self._tracer = tracer
        self._facts = facts
        self._load_state = load_state

    def start_run(self, parent: Context, request: AcceptedRequest, received_ns: int) -> trace.Span:
        """Start the server span of one request."""
        constraint = request.params.constraint
        backend = constraint.backend if constraint is not None else None
        return self._tracer.start_span(
            "run",
            context=parent,
            kind=SpanKind.SERVER,
            start_time=received_ns,
            attributes={
                "inferfleet.request_id": request.request_id,
                "inferfleet.engine_id": self._facts.engine_id,
                "inferfleet.attempt": request.attempt,
                "inferfleet.placement_version": self._load_state.placement_version,
                "gen_ai.operation.name": "text_completion",
                "gen_ai.provider.name": "inferfleet",
                "gen_ai.request.model": self._facts.model,
                "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
                **({"inferfleet.constraint.backend": backend} if backend else {}),
            },
        )

    def end_run(
        self, span: trace.Span, stream: RequestStream | None, error: BaseException | None
    ) -> None:
        """End the server span with the request's token counts, finish reasons and status."""
        if stream is not None:
            span.set_attribute("gen_ai.usage.cache_read.input_tokens", stream.num_cached_tokens)
            span.set_attribute("gen_ai.usage.output_tokens", stream.num_completion_tokens)
            span.set_attribute("gen_ai.response.finish_reasons", stream.finish_reasons)
        if error is not None:
            code = error.code if isinstance(error, FleetError) else grpc.StatusCode.CANCELLED
            span.set_attribute("rpc.grpc.status_code", code.value[0])
            span.set_status(Status(StatusCode.ERROR, f"{code.name}: {error}"))
        span.end()

    def add_steps(self, run: trace.Span, stream: RequestStream) -> None:
        """Add the steps as children of `run`; called once the request's blocks are free."""
        context = trace.set_span_in_context(run)
        attributes = {
            "inferfleet.request_id": stream.request.request_id,
            "inferfleet.engine_id": self._facts.engine_id,
        }
        for verb, start, end in stream.times.intervals():
            span = self._tracer.start_span(
                verb, context=context, start_time=start, attributes=attributes
            )
            if verb == "submit":
                _add_events(span, stream.times.marks, end)
            span.end(end_time=end)


def _add_events(span: trace.Span, marks: Iterable[Mark], until_ns: int) -> None:
    """Add an event per prefill chunk and per preemption."""
    submits = [mark for mark in marks if mark.verb == "submit"]
    for mark in submits[:_MAX_EVENTS]:
        if mark.preempted or mark.unix_ns <= until_ns:
            name = "preempted" if mark.preempted else "chunk"
            span.add_event(name, attributes=_attributes(mark), timestamp=mark.unix_ns)


def _attributes(mark: Mark) -> dict[str, int]:
    if mark.preempted:
        named = {"preempted": 1, "choice": mark.choice, "lost_tokens": mark.lost_tokens}
    else:
        named = {"step": mark.step, "start": mark.start, "tokens": mark.tokens}
    return {name: value for name, value in named.items() if value is not None}
