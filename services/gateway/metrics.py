"""What a gateway tells of each request: one span from arrival to end, and the metrics."""

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

_SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2.5)


class Metrics:
    """The gateway's series; names are OpenTelemetry's GenAI ones in Prometheus' spelling."""

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


@dataclass(frozen=True)
class Facts:
    """What is known of a request that has ended."""

    operation: str
    arrived_s: float
    """Seconds since 1970."""
    took_s: float
    status: str
    reason: str
    summary: inference_pb2.Summary | None


class Observation:
    """One request as the span and the metrics see it; `end` is idempotent."""

    def __init__(
        self,
        metrics: Metrics,
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
        self.revision = ""
        """Of the engine that answered; "" before it has."""
        self._took_s = 0.0
        self._status, self._reason = "", ""
        self._reasons: list[str] = []
        self._ended = False
        asked = request.model[:128]
        self.span = tracer.start_span(
            f"{self._operation} {asked}",
            context=parent,
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": self._operation,
                "gen_ai.provider.name": "inferfleet",
                "gen_ai.request.model": asked,
                "inferfleet.request_id": request_id,
                **_asked_of(request),
            },
        )
        self.context = trace.set_span_in_context(self.span, Context())
        self.trace_id = telemetry.trace_id_of(self.span)
        metrics.in_flight.labels(face).inc()

    @property
    def complete(self) -> bool:
        """Whether the stream came to its proper end."""
        return self._summary is not None

    @property
    def facts(self) -> Facts:
        """Only once it has ended."""
        return Facts(
            operation=self._operation,
            arrived_s=self._arrived_s,
            took_s=self._took_s,
            status=self._status,
            reason=self._reason,
            summary=self._summary,
        )

    def known_model(self, name: str) -> None:
        """The model exists: only now may it label a series."""
        self._model = name
        self.span.set_attribute("gen_ai.response.model", name)

    def saw(self, raw: bytes) -> None:
        """A message passed by; deltas after the first cost a comparison, the rest is parsed."""
        if raw[:1] == b"\x12":
            if self._first_token_s is None:
                self._first_token_s = time.monotonic()
                self.span.add_event("first_token")
                self._metrics.ttft.labels(self._operation, self._model).observe(
                    self._first_token_s - self._started_s
                )
            return
        message = inference_pb2.GenerateResponse.FromString(raw)
        if message.HasField("started"):
            self.revision = message.started.model_revision
        elif message.HasField("finished"):
            self._reasons.append(reason_name(message.finished.reason))
        elif message.HasField("summary"):
            self._summary = message.summary
            self.span.set_attribute("inferfleet.engine_id", message.summary.engine_id)
            self.span.set_attribute("inferfleet.continuations", message.summary.continuations)

    def end(self, error: BaseException | None = None) -> None:
        """The request is over; what it ended with decides the span's status."""
        if self._ended:
            return
        self._ended = True
        now = time.monotonic()
        code = self._status = _code_of(error)
        self._reason = getattr(error, "reason", "") if error is not None else ""
        self._took_s = now - self._started_s
        self._metrics.in_flight.labels(self._face).dec()
        self._metrics.requests.labels(self._face, code).inc()
        self._metrics.duration.labels(
            self._operation, self._model, "" if code == "OK" else code
        ).observe(self._took_s)
        self._tell_usage(now)
        if error is not None:
            self.span.set_attribute("error.type", getattr(error, "reason", code))
            self.span.set_status(Status(StatusCode.ERROR, str(error)[:256] or code))
        self.span.end()

    def _tell_usage(self, now: float) -> None:
        usage = self._summary.usage if self._summary is not None else None
        if self._reasons:
            self.span.set_attribute("gen_ai.response.finish_reasons", self._reasons)
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
    """EOS, MAX_TOKENS, …; UNSPECIFIED for a number this build does not know."""
    try:
        return inference_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_")
    except ValueError:
        return "UNSPECIFIED"


def _code_of(error: BaseException | None) -> str:
    if error is None:
        return "OK"
    if isinstance(error, FleetError):
        return str(error.code.name)
    return InternalError.code.name if isinstance(error, Exception) else CancelledError.code.name


def _asked_of(request: inference_pb2.GenerateRequest) -> dict[str, Any]:
    asked: dict[str, Any] = {}
    for name, source, key in (
        ("gen_ai.request.temperature", request.sampling, "temperature"),
        ("gen_ai.request.top_p", request.sampling, "top_p"),
        ("gen_ai.request.top_k", request.sampling, "top_k"),
        ("gen_ai.request.choice.count", request.sampling, "n"),
        ("gen_ai.request.max_tokens", request.stop, "max_tokens"),
    ):
        if source.HasField(key):
            asked[name] = getattr(source, key)
    return asked
