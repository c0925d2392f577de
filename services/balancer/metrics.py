"""The metrics of the balancer.

The parts write counters and histograms. Gauges are read from the owner of the value at each scrape,
so that no value is counted twice.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

_FAST_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
_WAIT_S = (0.001, 0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60)


@dataclass(frozen=True)
class EngineGauges:
    """The gauges of one engine."""

    engine_id: str
    model: str
    state: str
    in_flight: int
    breaker: int


class BalancerMetrics:
    """All metrics of the balancer, in one Prometheus registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        name = "inferfleet_balancer_"

        def counter(what: str, text: str, *labels: str) -> Counter:
            return Counter(name + what, text, labels, registry=self.registry)

        self.requests = counter("requests", "Requests by final gRPC status.", "model", "status")
        self.decisions = counter("decisions", "Routing decisions.", "policy", "engine")
        self.revision_requests = counter(
            "revision_requests",
            "Requests by the revision that ended them and final gRPC status.",
            "model",
            "revision",
            "status",
        )
        self.retries = counter("retries", "Attempts after the first, by cause.", "status")
        self.continuations = counter(
            "continuations", "Streams that broke after their first message.", "outcome"
        )
        self.match_s = Histogram(
            name + "match_seconds",
            "Time of a prefix match.",
            ["outcome"],
            buckets=_FAST_S,
            registry=self.registry,
        )
        self.decision_s = Histogram(
            name + "decision_seconds",
            "Time of a choice, without the match.",
            buckets=_FAST_S,
            registry=self.registry,
        )
        self.queue_s = Histogram(
            name + "queue_seconds",
            "Time a request waited for a slot.",
            buckets=_WAIT_S,
            registry=self.registry,
        )
        self.first_message_s = Histogram(
            name + "first_message_seconds",
            "Arrival to the engine's first message.",
            buckets=_WAIT_S,
            registry=self.registry,
        )

    def watch(
        self,
        engines: Callable[[], Iterable[EngineGauges]],
        queued: Callable[[], Mapping[str, int]],
        index_breaker: Callable[[], int],
    ) -> None:
        """Register the sources of the gauges, which are read at each scrape.

        Args:
            engines: gauges of all engines.
            queued: waiting requests by model.
            index_breaker: state of the prefix index's breaker.
        """
        self.registry.register(_Gauges(engines, queued, index_breaker))


class _Gauges(Collector):
    def __init__(
        self,
        engines: Callable[[], Iterable[EngineGauges]],
        queued: Callable[[], Mapping[str, int]],
        index_breaker: Callable[[], int],
    ) -> None:
        self._engines = engines
        self._queued = queued
        self._index_breaker = index_breaker

    def describe(self) -> Iterable[Metric]:
        """No descriptions: the owners may not exist yet."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Read one sample per engine and model."""
        in_flight = GaugeMetricFamily(
            "inferfleet_balancer_in_flight", "Requests at an engine.", labels=["engine"]
        )
        breaker = GaugeMetricFamily(
            "inferfleet_balancer_breaker_state",
            "0 closed, 1 half open, 2 open.",
            labels=["peer"],
        )
        state = GaugeMetricFamily(
            "inferfleet_balancer_engine_state",
            "1 for the state an engine is in.",
            labels=["engine", "model", "state"],
        )
        for engine in list(self._engines()):
            in_flight.add_metric([engine.engine_id], engine.in_flight)
            breaker.add_metric([engine.engine_id], engine.breaker)
            state.add_metric([engine.engine_id, engine.model, engine.state], 1)
        breaker.add_metric(["kvcache"], self._index_breaker())
        queue = GaugeMetricFamily(
            "inferfleet_balancer_queue_length", "Requests waiting for a slot.", labels=["model"]
        )
        for model, length in self._queued().items():
            queue.add_metric([model], length)
        return in_flight, breaker, state, queue
