"""What the service's metrics count of a batch."""

from services.kvcache.events import HISTORY, STATE, Batch, Operation
from services.kvcache.metrics import KvCacheMetrics, value_of


def test_snapshots_are_counted_by_their_hashes():
    metrics = KvCacheMetrics()
    operations = (
        Operation("S", HISTORY, b"a" * 64),
        Operation("S", STATE, b"a" * 48),
        Operation("R", STATE, b"a" * 16),
        Operation("C", 0, b""),
    )
    metrics.count_applied(Batch("e", 1, 1, operations))
    found = [value_of(one) for one in (metrics.batches, metrics.events, metrics.states)]
    assert found == [1, 4, 3]
