"""Three times more than the engines can do: who is refused is told when to come again, who is
started gets an answer, and nobody's flood is another's famine."""

import pytest

from benchmarks.bench_overload import Plan, measure


async def test_beyond_capacity_work_is_refused_not_wasted():
    plan = Plan(engines=2, seats=4, service_s=0.6, deadline_s=5.0, seconds=4.0)
    (outcome,) = await measure(plan, [3.0])
    assert outcome.asked > 60
    assert sum(outcome.ends.values()) == outcome.asked, "every request ends"
    assert set(outcome.ends) <= {"OK", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}
    assert outcome.ends["RESOURCE_EXHAUSTED"] > 0, "there was too much of it"
    assert outcome.without_hint == 0
    assert outcome.good >= outcome.started / 2, "what is started is mostly of use"
    shares = {tenant: good / asked for tenant, (good, asked) in outcome.by_tenant.items()}
    assert min(shares["calm"], shares["quiet"]) >= shares["flood"], shares


@pytest.mark.verify
async def test_goodput_at_three_times_the_capacity():
    outcomes = await measure(Plan(), [0.8, 1.0, 1.5, 3.0])
    peak = max(outcome.goodput for outcome in outcomes)
    assert outcomes[-1].goodput >= 0.9 * peak, outcomes
    assert sum(outcome.without_hint for outcome in outcomes) == 0
