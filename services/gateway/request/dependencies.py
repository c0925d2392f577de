"""The parts of the gateway that every request uses."""

from collections.abc import Sequence
from dataclasses import dataclass

from opentelemetry import trace

from services.gateway.balancers import Balancers
from services.gateway.callers.quota.quotas import Quotas
from services.gateway.callers.records.audit import Audit
from services.gateway.callers.records.line_log import Sink
from services.gateway.metrics import GatewayMetrics
from services.gateway.request.admission import RequestAdmission
from services.gateway.request.in_flight import InFlight
from services.gateway.request.text_calls import TextCalls


@dataclass(frozen=True)
class Dependencies:
    """Made once by the service and shared by all requests."""

    admission: RequestAdmission
    balancers: Balancers
    in_flight: InFlight
    metrics: GatewayMetrics
    tracer: trace.Tracer
    request_timeout_s: float
    """The longest life of a request."""
    quotas: Quotas
    audit: Audit
    text_calls: TextCalls
    usage: Sequence[Sink] = ()
    """Sinks of usage records."""
