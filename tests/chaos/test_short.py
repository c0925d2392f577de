"""`make chaos` in short: one real fleet, a fault of every kind, nothing that a client notices."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.chaos.fleet import Shape
from tests.chaos.run import SCENARIOS, stage
from tests.chaos.scenario import Plan, Stage

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.services,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]
# etcd sleeps longer than the services' lease of 5 s.
PLAN = Plan(streams=10, rounds=2, outage_s=2.0, pause_s=6.0, tokens=160)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def made(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """A whole fleet that is shared by all tests of this file; each leaves it whole."""
    root = tmp_path_factory.mktemp("chaos")
    async with stage(Shape(engines=2), PLAN, print, root) as running:
        yield running


@pytest.mark.parametrize(
    "name",
    ["engine-kill", "balancer-kill", "gateway-kill", "clients-leave", "redis-stop", "etcd-stop"],
)
async def test_no_request_fails_and_no_token_is_lost_sent_twice_or_changed(made: Stage, name: str):
    for row in await SCENARIOS[name](made):
        assert row.judge(strict_times=False) == []
        assert row.counts.requests >= PLAN.streams
        assert row.heal_s
