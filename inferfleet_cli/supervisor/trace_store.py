"""Keeps recent traces in bounded memory; finds them by trace id or request id."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

REQUEST_ID = "inferfleet.request_id"
MAX_TRACES = 1000
MAX_SPANS_PER_TRACE = 2000


@dataclass(frozen=True)
class SpanEvent:
    """An event of a span."""

    name: str
    time_ns: int
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Span:
    """One received span; times are Unix nanoseconds."""

    trace_id: str
    span_id: str
    parent_span_id: str
    """"" for a root span."""
    name: str
    service: str
    start_ns: int
    end_ns: int
    error: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    resource: Mapping[str, Any] = field(default_factory=dict)
    events: tuple[SpanEvent, ...] = ()


class TraceStore:
    """Keeps the most recently updated traces; the least recently updated one is dropped first."""

    def __init__(self, max_traces: int = MAX_TRACES) -> None:
        self._max_traces = max_traces
        self._spans: OrderedDict[str, dict[str, Span]] = OrderedDict()
        self._trace_of_request: dict[str, str] = {}

    def add(self, spans: Iterable[Span]) -> None:
        """Store spans; a known span id is replaced, spans over the limit are dropped."""
        for span in spans:
            trace = self._spans.setdefault(span.trace_id, {})
            self._spans.move_to_end(span.trace_id)
            if len(trace) < MAX_SPANS_PER_TRACE or span.span_id in trace:
                trace[span.span_id] = span
                if request_id := span.attributes.get(REQUEST_ID):
                    self._trace_of_request[str(request_id)] = span.trace_id
        while len(self._spans) > self._max_traces:
            self._forget(self._spans.popitem(last=False)[1].values())

    def find(self, key: str) -> list[Span]:
        """The spans of a request id or trace id, by start time; empty if the id is unknown."""
        spans = self._spans.get(self._trace_of_request.get(key, key.lower()), {})
        return sorted(spans.values(), key=lambda span: span.start_ns)

    def __len__(self) -> int:
        return len(self._spans)

    def _forget(self, spans: Iterable[Span]) -> None:
        for span in spans:
            request_id = str(span.attributes.get(REQUEST_ID, ""))
            if self._trace_of_request.get(request_id) == span.trace_id:
                del self._trace_of_request[request_id]
