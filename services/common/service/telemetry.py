"""Traces and logs of a process: spans of one trace over all hops, and JSON log lines with its id.

`lifecycle.main` calls `setup` once. If the collector is away, spans are lost and nothing else.
"""

import contextlib
import contextvars
import json
import logging
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from services.common.service.log_level import LogLevel

request_id_var: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")
_PROPAGATOR = TraceContextTextMapPropagator()
_KEYS = ("traceparent", "tracestate")
_FLUSH_S = 2.0


class Telemetry:
    """A service's tracer and log level."""

    def __init__(
        self,
        provider: TracerProvider,
        exporter: SpanExporter | None = None,
        log_level: LogLevel | None = None,
    ) -> None:
        self._provider = provider
        self._exporter = exporter
        self.tracer = provider.get_tracer("inferfleet")
        self.log_level = log_level if log_level is not None else LogLevel()

    def close(self) -> None:
        """Export the remaining spans, for a few seconds at most; idempotent."""
        # The provider's own flush has no timeout: without a collector it takes as long as all
        # retries together. Shutting the exporter down ends them.
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
        log_level: least severe level to log: debug, info, warning or error.
        attributes: further resource attributes, e.g. the engine's id.
        exporter: used instead of OTLP, by tests.
    """
    _log_as_json(service, log_level)
    resource = Resource.create(
        {"service.name": service, "service.namespace": "inferfleet", **(attributes or {})}
    )
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    if exporter is None and otlp_endpoint:
        # Not for an engine's core, which exports nothing and must start soon.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        exporter = OTLPSpanExporter(
            endpoint=otlp_endpoint, insecure=otlp_endpoint.startswith("http:")
        )
    if exporter is not None:
        provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=200))
    return Telemetry(provider, exporter, LogLevel(log_level))


def extract(metadata: Iterable[tuple[str, Any]] | None) -> Context:
    """The trace context of an incoming call; an empty one (a new trace) if absent or malformed."""
    carrier = {k: v for k, v in metadata or () if k in _KEYS and isinstance(v, str)}
    return _PROPAGATOR.extract(carrier, context=Context())


def inject(context: Context) -> tuple[tuple[str, str], ...]:
    """The metadata that passes a trace context to the next hop."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context=context)
    return tuple(carrier.items())


def trace_id_of(span: trace.Span) -> str:
    """The trace id of a span: 32 hexadecimal digits."""
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


class _JsonHandler(logging.StreamHandler[Any]):
    """Writes JSON lines; a record that cannot be formatted becomes a line that says so."""

    def handleError(self, record: logging.LogRecord) -> None:
        broken = f"a log record of {record.pathname}:{record.lineno} cannot be formatted"
        error = sys.exc_info()[1]
        with contextlib.suppress(OSError, ValueError):  # stderr is closed: nothing can be said
            line = {"level": "error", "logger": record.name, "message": broken}
            self.stream.write(json.dumps({**line, "exception": repr(error)}) + "\n")


def log_stray_output() -> None:
    """Log what Python would print to stderr itself: uncaught exceptions of any thread, warnings.

    Call it in processes of our own only: it replaces the interpreter's hooks.
    """
    stray = logging.getLogger("uncaught")

    def of_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            name = args.thread.name if args.thread else "unknown"
            stray.critical("thread %s ended by an exception", name, exc_info=args.exc_value)

    def of_process(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        stray.critical("the process ends by an exception", exc_info=(kind, error, trace))

    def unraisable(args: Any) -> None:
        stray.error("exception ignored in %r", args.object, exc_info=args.exc_value)

    sys.excepthook, threading.excepthook, sys.unraisablehook = of_process, of_thread, unraisable
    logging.captureWarnings(True)


def _log_as_json(service: str, level: str) -> None:
    handler = _JsonHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # The exporter logs a stack trace for every failed export.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    logging.getLogger("grpc").setLevel(logging.WARNING)
