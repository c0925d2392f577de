"""The parts of the balancer that every stream uses. One instance per process."""

from dataclasses import dataclass

from services.balancer.config import BalancerConfig
from services.balancer.engines.registry import EngineRegistry
from services.balancer.metrics import BalancerMetrics
from services.balancer.queue.admission import Admission
from services.balancer.routing.decision_ledger import DecisionLedger
from services.balancer.routing.prefix_match import PrefixMatcher
from services.balancer.routing.router import Router


@dataclass(frozen=True)
class Dependencies:
    """Made by `BalancerService`, shared by all streams."""

    config: BalancerConfig
    registry: EngineRegistry
    admission: Admission
    matcher: PrefixMatcher
    router: Router
    decisions: DecisionLedger
    metrics: BalancerMetrics
