"""The engine's Prometheus metrics, named by the OpenTelemetry GenAI conventions where possible."""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.engine.contract.messages import (
    CoreReady,
    RemovedBlocks,
    RoundReport,
    StoredBlocks,
)
from services.engine.front.kv_events import KvEventLog
from services.engine.front.request_stream import RequestStream
from services.engine.front.request_times import RequestTimes

_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_DURATION_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class EngineMetrics:
    """The metrics of one engine in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self._gauges: Mapping[str, Gauge] = {
            "running_requests": Gauge(
                "inferfleet_engine_running_requests", "Requests being computed", registry=r
            ),
            "waiting_requests": Gauge(
                "inferfleet_engine_waiting_requests", "Requests waiting for room", registry=r
            ),
            "held_blocks": Gauge(
                "inferfleet_engine_held_blocks", "Blocks held by running requests", registry=r
            ),
            "total_blocks": Gauge("inferfleet_engine_blocks", "Blocks there are", registry=r),
        }
        self._prompt_tokens = Counter(
            "inferfleet_engine_prompt_tokens", "Prompt tokens of started requests", registry=r
        )
        self._cached_tokens = Counter(
            "inferfleet_engine_cached_tokens", "Prompt tokens found in the cache", registry=r
        )
        self._output_tokens = Counter(
            "inferfleet_engine_output_tokens", "Tokens drawn and given out", registry=r
        )
        self._preemptions = Counter(
            "inferfleet_engine_preemptions", "Requests whose blocks were taken back", registry=r
        )
        self._stored = Counter(
            "inferfleet_engine_cache_stored",
            "Blocks (history) and snapshots (state) that became reusable",
            ("kind",),
            registry=r,
        )
        self._evicted = Counter(
            "inferfleet_engine_cache_evicted",
            "Reusable blocks (history) and snapshots (state) that were evicted",
            ("kind",),
            registry=r,
        )
        self._rounds = Counter("inferfleet_engine_rounds", "Rounds of the core", registry=r)
        self._requests = Counter(
            "inferfleet_engine_requests",
            "Requests that ended, by gRPC status and finish reason",
            ("code", "finish_reason"),
            registry=r,
        )
        self._ttft = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Arrival at the engine to its first token",
            buckets=_TTFT_BUCKETS,
            registry=r,
        )
        self._itl = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Time between output tokens after the first",
            buckets=_ITL_BUCKETS,
            registry=r,
        )
        self._duration = Histogram(
            "gen_ai_server_request_duration_seconds",
            "Arrival at the engine to the end of the stream",
            buckets=_DURATION_BUCKETS,
            registry=r,
        )

    def set_capacity(self, ready: CoreReady) -> None:
        """Set the number of blocks, which never changes."""
        self._gauges["total_blocks"].set(ready.num_blocks)

    def watch_kv_events(self, events: KvEventLog) -> None:
        """Add gauges of the batches that the KV-cache service has not acknowledged."""
        unacknowledged = Gauge(
            "inferfleet_engine_kv_event_batches_unacknowledged",
            "Batches of block events that the KV-cache service has not acknowledged",
            registry=self.registry,
        )
        unacknowledged.set_function(lambda: events.num_unacknowledged)
        dropped = Gauge(
            "inferfleet_engine_kv_event_batches_dropped",
            "Batches dropped while the service was away; a snapshot replaces them",
            registry=self.registry,
        )
        dropped.set_function(lambda: events.num_dropped)

    def count_tokens(self, times: RequestTimes, num_tokens: int) -> None:
        """Count one output's tokens and record them in the request's times."""
        if not num_tokens:
            return
        before = times.last_token_ns
        times.record_token()
        self._output_tokens.inc(num_tokens)
        if before is None:
            self._ttft.observe(times.time_to_first_token_s or 0.0)
        else:
            self._itl.observe(max(0, (times.last_token_ns or before) - before) / 1e9 / num_tokens)

    def count_round(self, report: RoundReport) -> None:
        """Set the gauges from a round's load; count the round, its preemptions and cache events."""
        for name, gauge in self._gauges.items():
            gauge.set(getattr(report.load, name))
        self._rounds.inc()
        preempted = sum(mark.preempted for mark in report.marks)
        if preempted:
            self._preemptions.inc(preempted)
        for event in report.cache_events:
            if isinstance(event, StoredBlocks):
                self._stored.labels(event.kind).inc(len(event.hashes))
            elif isinstance(event, RemovedBlocks):
                self._evicted.labels(event.kind).inc(len(event.hashes))

    def count_request(self, code: str, stream: RequestStream | None, duration_s: float) -> None:
        """Count a request that ended.

        Args:
            code: name of its gRPC status.
            stream: None if the request was refused.
        """
        reasons = stream.finish_reasons if stream is not None else []
        self._requests.labels(code, reasons[0] if reasons and code == "OK" else "").inc()
        self._duration.observe(duration_s)
        if stream is not None and stream.started:
            self._prompt_tokens.inc(len(stream.request.prompt_token_ids))
            self._cached_tokens.inc(stream.num_cached_tokens)
