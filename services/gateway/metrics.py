"""The span and the metrics of each request, from arrival to end."""

import time
from dataclasses import dataclass
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from inferfleet_proto.v1 import inference_pb2
from services.common.errors import CancelledError, FleetError, InternalError
from services.common.service import telemetry
from services.gateway.message_tags import DELTA_TAG

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2.5)


class GatewayMetrics:
    """The gateway's series; names follow OpenTelemetry's GenAI conventions."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("gen_ai_operation_name", "gen_ai_request_model")
        self.ttft = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Arrival to first token",
            labels,
            buckets=_SECONDS,
            registry=registry,
        )
        self.per_token = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Mean time of an output token after the first",
            labels,
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )
        self.duration = Histogram(
            "gen_ai_server_request_duration_seconds",
            "Arrival to end",
            (*labels, "error_type"),
            buckets=_SECONDS,
            registry=registry,
        )
        self.requests = Counter(
            "inferfleet_gateway_requests",
            "Requests ended, by gRPC status",
            ("face", "status"),
            registry=registry,
        )
        self.in_flight = Gauge(
            "inferfleet_gateway_in_flight", "Requests in flight", ("face",), registry=registry
        )
        self.text_calls = Counter(
            "inferfleet_gateway_text_calls",
            "Calls of Tokenize and Detokenize ended, by gRPC status",
            ("method", "status"),
            registry=registry,
        )
        self.text_seconds = Histogram(
            "inferfleet_gateway_text_call_seconds",
            "Arrival to end of Tokenize and Detokenize",
            ("method",),
            buckets=_SECONDS,
            registry=registry,
        )
        self.unauthenticated = Counter(
            "inferfleet_gateway_unauthenticated",
            "Calls without a valid API key, by reason",
            ("face", "reason"),
            registry=registry,
        )
        self.http_refusals = Counter(
            "inferfleet_gateway_http_refusals",
            "HTTP requests refused for a bound of heads or bodies, by HTTP status: 408, 431, 503; "
            "a body that is too long (413) is not counted",
            ("status",),
            registry=registry,
        )


@dataclass(frozen=True)
class RequestOutcome:
    """How a request ended."""

    operation: str
    """"chat" or "text_completion"."""
    arrived_s: float
    """Seconds since 1970."""
    took_s: float
    status: str
    """Name of the gRPC status."""
    reason: str
    """Of the error; "" without one."""
    summary: inference_pb2.Summary | None
    """None if the stream did not complete."""


class Observation:
    """Records one request in a span and in the metrics; `end` is idempotent."""

    def __init__(
        self,
        metrics: GatewayMetrics,
        tracer: trace.Tracer,
        request: inference_pb2.GenerateRequest,
        *,
        face: str,
        parent: Context,
        request_id: str,
    ) -> None:
        self._metrics = metrics
        self._face = face
        self._operation = "chat" if request.WhichOneof("prompt") == "chat" else "text_completion"
        self._model = ""
        self._arrived_s = time.time()
        self._started_s = time.monotonic()
        self._first_token_s: float | None = None
        self._summary: inference_pb2.Summary | None = None
        self.revision: str | None = None
        """Of the engine that answered; None before its first message."""
        self._finish_reasons: list[str] = []
        self._outcome: RequestOutcome | None = None
        model = request.model[:128]
        self.span = tracer.start_span(
            f"{self._operation} {model}",
            context=parent,
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": self._operation,
                "gen_ai.provider.name": "inferfleet",
                "gen_ai.request.model": model,
                "inferfleet.request_id": request_id,
                **_request_attributes(request),
            },
        )
        self.context = trace.set_span_in_context(self.span, Context())
        self.trace_id = telemetry.trace_id_of(self.span)
        metrics.in_flight.labels(face).inc()

    @property
    def complete(self) -> bool:
        """Whether the stream has delivered its Summary."""
        return self._summary is not None

    @property
    def outcome(self) -> RequestOutcome:
        """How the request ended; only after `end`."""
        assert self._outcome is not None, "the request has not ended"
        return self._outcome

    def set_model(self, name: str) -> None:
        """Label the series with the model, once it is known to exist."""
        self._model = name
        self.span.set_attribute("gen_ai.response.model", name)

    def record(self, raw: bytes) -> None:
        """Record a message on its way to the caller; deltas are not parsed."""
        if raw[:1] == DELTA_TAG:
            if self._first_token_s is None:
                self._record_first_token()
            return
        message = inference_pb2.GenerateResponse.FromString(raw)
        if message.HasField("started"):
            self.revision = message.started.model_revision
        elif message.HasField("finished"):
            self._finish_reasons.append(reason_name(message.finished.reason))
        elif message.HasField("summary"):
            self._summary = message.summary
            self.span.set_attribute("inferfleet.engine_id", message.summary.engine_id)
            self.span.set_attribute("inferfleet.continuations", message.summary.continuations)

    def end(self, error: BaseException | None = None) -> None:
        """End the span and count the request; the error decides its status."""
        if self._outcome is not None:
            return
        now = time.monotonic()
        code = _status_name(error)
        self._outcome = RequestOutcome(
            operation=self._operation,
            arrived_s=self._arrived_s,
            took_s=now - self._started_s,
            status=code,
            reason=getattr(error, "reason", "") if error is not None else "",
            summary=self._summary,
        )
        self._metrics.in_flight.labels(self._face).dec()
        self._metrics.requests.labels(self._face, code).inc()
        self._metrics.duration.labels(
            self._operation, self._model, "" if code == "OK" else code
        ).observe(self._outcome.took_s)
        self._record_usage(now)
        if error is not None:
            self.span.set_attribute("error.type", getattr(error, "reason", code))
            self.span.set_status(Status(StatusCode.ERROR, str(error)[:256] or code))
        self.span.end()

    def _record_first_token(self) -> None:
        self._first_token_s = time.monotonic()
        self.span.add_event("first_token")
        self._metrics.ttft.labels(self._operation, self._model).observe(
            self._first_token_s - self._started_s
        )

    def _record_usage(self, now: float) -> None:
        usage = self._summary.usage if self._summary is not None else None
        if self._finish_reasons:
            self.span.set_attribute("gen_ai.response.finish_reasons", self._finish_reasons)
        if usage is None:
            return
        self.span.set_attributes(
            {
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            }
        )
        if self._first_token_s is not None and usage.completion_tokens > 1:
            each = (now - self._first_token_s) / (usage.completion_tokens - 1)
            self._metrics.per_token.labels(self._operation, self._model).observe(each)


def reason_name(reason: inference_pb2.FinishReason) -> str:
    """EOS, MAX_TOKENS, …; UNSPECIFIED for a number that is not in this build's proto."""
    try:
        return inference_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_")
    except ValueError:
        return "UNSPECIFIED"


def _status_name(error: BaseException | None) -> str:
    if error is None:
        return "OK"
    if isinstance(error, FleetError):
        return str(error.code.name)
    return InternalError.code.name if isinstance(error, Exception) else CancelledError.code.name


def _request_attributes(request: inference_pb2.GenerateRequest) -> dict[str, Any]:
    attributes: dict[str, Any] = {}
    for name, source, key in (
        ("gen_ai.request.temperature", request.sampling, "temperature"),
        ("gen_ai.request.top_p", request.sampling, "top_p"),
        ("gen_ai.request.top_k", request.sampling, "top_k"),
        ("gen_ai.request.choice.count", request.sampling, "n"),
        ("gen_ai.request.max_tokens", request.stop, "max_tokens"),
    ):
        if source.HasField(key):
            attributes[name] = getattr(source, key)
    return attributes
