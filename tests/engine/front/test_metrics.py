"""What the engine's metrics count of a round's report."""

from prometheus_client import generate_latest

from services.engine.contract.messages import (
    ClearedBlocks,
    RemovedBlocks,
    RoundReport,
    StoredBlocks,
)
from services.engine.front.metrics import EngineMetrics


def test_blocks_and_snapshots_are_counted_apart():
    metrics = EngineMetrics()
    metrics.count_round(
        RoundReport(
            step=1,
            cache_events=[
                StoredBlocks([b"a" * 32, b"b" * 32], None),
                StoredBlocks([b"b" * 32], None, kind="state"),
                RemovedBlocks([b"a" * 32, b"b" * 32, b"c" * 32]),
                RemovedBlocks([b"b" * 32], kind="state"),
                ClearedBlocks(),
            ],
        )
    )
    lines = generate_latest(metrics.registry).decode().splitlines()
    for name, kind, count in (
        ("stored", "history", 2),
        ("stored", "state", 1),
        ("evicted", "history", 3),
        ("evicted", "state", 1),
    ):
        assert f'inferfleet_engine_cache_{name}_total{{kind="{kind}"}} {count}.0' in lines
