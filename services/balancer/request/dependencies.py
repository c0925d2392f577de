"""The parts of the balancer that every stream uses, and how they are connected."""

import random
import time
from dataclasses import dataclass

from opentelemetry import trace

from services.balancer.config import BalancerConfig
from services.balancer.engines.engine_view import CostModel
from services.balancer.engines.registry import EngineRegistry
from services.balancer.metrics import BalancerMetrics
from services.balancer.queue.admission import Admission
from services.balancer.routing.decision_ledger import DecisionLedger
from services.balancer.routing.prefix_match import PrefixMatcher
from services.balancer.routing.router import Router
from services.common.etcd.registry import RegistryRecords
from services.common.rpc import Membership
from services.common.service.background import Background


@dataclass(frozen=True)
class Dependencies:
    """One instance per process, shared by all streams."""

    config: BalancerConfig
    registry: EngineRegistry
    admission: Admission
    matcher: PrefixMatcher
    router: Router
    decisions: DecisionLedger
    metrics: BalancerMetrics


def make_dependencies(
    config: BalancerConfig,
    membership: Membership,
    records: RegistryRecords,
    background: Background,
    tracer: trace.Tracer,
) -> Dependencies:
    """Make the parts and connect them. The caller starts and stops them.

    Args:
        records: registry records of the engines.
        background: runs the registry's tasks.
    """
    metrics = BalancerMetrics()
    # Registry and admission depend on each other through these two calls only.
    registry = EngineRegistry(
        config,
        membership,
        records,
        background,
        changed=lambda: admission.pump(),
        clock=time.monotonic,
    )
    admission = Admission(
        registry.views,
        queue_size=config.queue_size,
        headroom=config.engine_headroom,
        patience_s=config.patience_s,
    )
    matcher = PrefixMatcher(
        config.kvcache,
        membership,
        timeout_s=config.match_timeout_s,
        tracer=tracer,
        observe=lambda outcome, seconds: metrics.match_s.labels(outcome).observe(seconds),
    )
    router = Router(
        config.policy,
        registry.views,
        admission.has_free_slots,
        cost=CostModel(pressure_s=config.pressure_s),
        rng=random.Random(),
        observe=metrics.decision_s.observe,
    )
    decisions = DecisionLedger(config.explain_requests)
    return Dependencies(config, registry, admission, matcher, router, decisions, metrics)
