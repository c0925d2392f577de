"""Converts a trace to the object that `trace --json` prints: spans in tree order, seconds."""

from collections.abc import Sequence
from typing import Any

from inferfleet_cli.supervisor.trace_store import REQUEST_ID, Span

NS_PER_S = 1e9
ENGINE_ID = "inferfleet.engine_id"


def trace_json(spans: Sequence[Span]) -> dict[str, Any]:
    """Convert the spans of one trace; parents come before children, siblings by start time."""
    start = min(span.start_ns for span in spans)
    request_ids = [s.attributes[REQUEST_ID] for s in spans if REQUEST_ID in s.attributes]
    return {
        "trace_id": spans[0].trace_id,
        "request_id": str(request_ids[0]) if request_ids else "",
        "duration_s": (max(span.end_ns for span in spans) - start) / NS_PER_S,
        "spans": [
            {**_span_json(span, start), "depth": depth, "instance": instance}
            for span, depth, instance in _in_tree_order(spans)
        ],
    }


def _in_tree_order(spans: Sequence[Span]) -> list[tuple[Span, int, str]]:
    """(span, depth, instance) in depth-first order from the roots."""
    known = {span.span_id for span in spans}
    children: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: (span.start_ns, span.end_ns)):
        parent = span.parent_span_id if span.parent_span_id in known else ""
        children.setdefault(parent, []).append(span)
    ordered: list[tuple[Span, int, str]] = []
    waiting = [(span, 0, _instance(span, None, "")) for span in reversed(children.get("", []))]
    while waiting:
        span, depth, instance = waiting.pop()
        ordered.append((span, depth, instance))
        for child in reversed(children.get(span.span_id, [])):
            waiting.append((child, depth + 1, _instance(child, span, instance)))
    return ordered


def _instance(span: Span, parent: Span | None, parent_instance: str) -> str:
    """The engine id of a span or of its parent, for engine spans; else the service's name."""
    if span.service != "engine":
        return span.service
    own = span.resource.get(ENGINE_ID) or span.attributes.get(ENGINE_ID)
    if own:
        return str(own)
    return parent_instance if parent is not None and parent.service == "engine" else span.service


def _span_json(span: Span, start_ns: int) -> dict[str, Any]:
    return {
        "name": span.name,
        "service": span.service,
        "span_id": span.span_id,
        "parent_span_id": span.parent_span_id,
        "start_s": (span.start_ns - start_ns) / NS_PER_S,
        "duration_s": (span.end_ns - span.start_ns) / NS_PER_S,
        "error": span.error,
        "attributes": dict(span.attributes),
        "resource": dict(span.resource),
        "events": [
            {
                "name": event.name,
                "at_s": (event.time_ns - start_ns) / NS_PER_S,
                "attributes": dict(event.attributes),
            }
            for event in span.events
        ],
    }
