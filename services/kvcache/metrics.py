"""The metrics of the KV-cache service, for /metrics and for Stats."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.common.block_hash import INDEX_HASH_BYTES
from services.kvcache.events import STATE, Batch, OperationCode

_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)


class KvCacheMetrics:
    """Metrics of this process; other processes may share its index."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, help: str) -> Counter:
            return Counter(f"inferfleet_kvcache_{name}", help, registry=self.registry)

        def gauge(name: str, help: str) -> Gauge:
            return Gauge(f"inferfleet_kvcache_{name}", help, registry=self.registry)

        self.store_up = gauge("store_up", "1 while Redis answers")
        self.entries = gauge("entries", "blocks in the index")
        self.owners = gauge("owners", "engines in the index")
        self.publishers = gauge("publishers", "open Publish streams")
        self.lag = gauge("lag_batches", "batches received and not stored, of the worst publisher")
        self.batches = counter("batches_applied", "batches written")
        self.events = counter("events_applied", "events written")
        self.states = counter("states_stored", "snapshots of fixed-size state written")
        self.gaps = counter("gaps", "times that a publisher was found to have lost batches")
        self.resyncs = counter("resyncs", "snapshots completed")
        self.stale = counter("stale_writes_refused", "batches of an engine's earlier epochs")
        self.dropped = counter("batches_dropped", "batches not written because Redis was away")
        self.refused = counter("entries_refused", "blocks not kept because of max_entries")
        self.swept = counter("entries_swept", "entries deleted by sweeps")
        self.given_up = counter("entries_given_up", "entries with owners deleted by max_entries")
        self.unknown = counter("matches_unknown", "matches that Redis did not answer in time")
        self.match_seconds = Histogram(
            "inferfleet_kvcache_match_seconds",
            "time of a Match that was answered",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.apply_seconds = Histogram(
            "inferfleet_kvcache_apply_seconds",
            "time from a batch's arrival to its being stored",
            buckets=_SECONDS,
            registry=self.registry,
        )

    def count_applied(self, batch: Batch) -> None:
        """Count a batch that was written."""
        self.batches.inc()
        self.events.inc(len(batch.operations))
        for operation in batch.operations:
            if operation.code == OperationCode.STORED and operation.bits & STATE:
                self.states.inc(len(operation.hashes) // INDEX_HASH_BYTES)


def value_of(metric: Counter | Gauge) -> int:
    """The current value of a counter or gauge."""
    return int(metric._value.get())
