"""Traces and logs: one trace id over every hop, and JSON lines that carry it.

`setup` is called once by each service's main. An exporter that is down costs nothing but its spans.
"""

import contextvars
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

request_id_var: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")
_PROPAGATOR = TraceContextTextMapPropagator()
_KEYS = ("traceparent", "tracestate")
_FLUSH_S = 2.0
_followers: list[Callable[[str], None]] = []

log = logging.getLogger(__name__)


class Telemetry:
    """A service's tracer and the means to stop it."""

    def __init__(self, provider: TracerProvider, exporter: SpanExporter | None = None) -> None:
        self._provider = provider
        self._exporter = exporter
        self.tracer = provider.get_tracer("inferfleet")

    def close(self) -> None:
        """Send what is still held, for at most a few seconds; idempotent."""
        # The provider's own flush knows no timeout: with a collector that is away it takes as
        # long as all retries together. Shutting the exporter down ends them.
        flush = threading.Thread(target=self._provider.force_flush, name="flush", daemon=True)
        flush.start()
        flush.join(_FLUSH_S)
        if self._exporter is not None:
            self._exporter.shutdown()
        self._provider.shutdown()


def setup(
    service: str,
    *,
    otlp_endpoint: str,
    log_level: str,
    attributes: Mapping[str, str] | None = None,
    exporter: SpanExporter | None = None,
) -> Telemetry:
    """Start JSON logging on stderr and, given an endpoint, the export of spans.

    Args:
        service: "gateway", "balancer", "engine" or "kvcache".
        otlp_endpoint: OTLP/gRPC collector; empty for none.
        log_level: least severe level to log.
        attributes: further resource attributes, e.g. the engine's id.
        exporter: used instead of OTLP, for tests.
    """
    _log_as_json(service, log_level)
    resource = Resource.create(
        {"service.name": service, "service.namespace": "inferfleet", **(attributes or {})}
    )
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    if exporter is None and otlp_endpoint:
        exporter = OTLPSpanExporter(
            endpoint=otlp_endpoint, insecure=otlp_endpoint.startswith("http:")
        )
    if exporter is not None:
        provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=200))
    return Telemetry(provider, exporter)


def log_level() -> str:
    """The least severe level that is logged now."""
    return logging.getLevelName(logging.getLogger().level).lower()


def set_log_level(level: str, *, by: str) -> None:
    """Log from this level on; from any thread.

    Args:
        by: who wants it, for the log itself.
    """
    before = log_level()
    logging.getLogger().setLevel(level.upper())
    # At warning: whoever quiets a service leaves a line, whatever the levels are.
    log.warning("log level %s instead of %s, by %s", level, before, by)
    for follower in list(_followers):
        follower(level)


def follow_log_level(follower: Callable[[str], None]) -> Callable[[], None]:
    """Call `follower` with each new level, in whichever thread sets it; the result ends that."""
    _followers.append(follower)
    return lambda: _followers.remove(follower)


def toggle_debug(configured: str) -> None:
    """Between `debug` and the configured level, for those who have only signals."""
    set_log_level("debug" if log_level() != "debug" else configured, by="a signal")


def extract(metadata: Iterable[tuple[str, Any]] | None) -> Context:
    """The trace context of an incoming call; an empty one (a new trace) if absent or malformed."""
    carrier = {k: v for k, v in metadata or () if k in _KEYS and isinstance(v, str)}
    return _PROPAGATOR.extract(carrier, context=Context())


def inject(context: Context) -> tuple[tuple[str, str], ...]:
    """Metadata that hands a trace context to the next hop."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context=context)
    return tuple(carrier.items())


def trace_id_of(span: trace.Span) -> str:
    """32 hexadecimal digits."""
    return format(span.get_span_context().trace_id, "032x")


class _JsonFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id_var.get():
            line["request_id"] = request_id_var.get()
        span_context = trace.get_current_span().get_span_context()
        if span_context.is_valid:
            line["trace_id"] = format(span_context.trace_id, "032x")
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def _log_as_json(service: str, level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Its every failed export is a stack trace; one warning per outage is what an operator needs.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    logging.getLogger("grpc").setLevel(logging.WARNING)
