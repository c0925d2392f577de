"""Three times the capacity: refusals have a retry hint, started requests end with an answer, and a
tenant that floods the fleet does not starve the others."""

import pytest

from benchmarks.bench_overload import Outcome, Plan, measure, ratios


async def test_beyond_capacity_work_is_refused_not_wasted():
    plan = Plan(engines=2, slots=4, service_s=0.6, deadline_s=5.0, seconds=4.0, rounds=1)
    (outcome,) = await measure(plan, [3.0])
    assert outcome.sent > 60
    assert sum(outcome.ends.values()) == outcome.sent, "every request ends"
    assert set(outcome.ends) <= {"OK", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}
    assert outcome.ends["RESOURCE_EXHAUSTED"] > 0, "there was too much of it"
    assert outcome.without_hint == 0
    assert outcome.good >= outcome.started / 2, "what is started is mostly of use"
    shares = {tenant: good / sent for tenant, (good, sent) in outcome.by_tenant.items()}
    assert min(shares["calm"], shares["quiet"]) >= shares["flood"], shares


def test_each_round_is_compared_with_its_own_peak():
    def outcome(number: int, load: float, goodput: float) -> Outcome:
        return Outcome(number, load, 0, 0, goodput, {}, {}, 0, 0, 0, 0.0)

    slow_machine = [outcome(1, 1.0, 8.0), outcome(1, 3.0, 6.0)]
    others = [outcome(n, load, goodput) for n in (0, 2) for load, goodput in ((1.0, 16), (3.0, 15))]
    assert ratios([*others, *slow_machine]) == {1.0: 1.0, 3.0: 15 / 16}


@pytest.mark.verify
@pytest.mark.parametrize("spread", [0.0, 0.3])
@pytest.mark.timeout(300)
async def test_goodput_at_three_times_the_capacity(spread):
    outcomes = await measure(Plan(spread=spread, seconds=12.0, rounds=2), [1.0, 1.5, 3.0])
    assert min(ratios(outcomes).values()) >= 0.85, outcomes
    assert ratios(outcomes)[3.0] >= 0.9, outcomes
    assert sum(outcome.without_hint for outcome in outcomes) == 0
    started = sum(outcome.started for outcome in outcomes)
    assert sum(outcome.good for outcome in outcomes) >= 0.9 * started, "hardly any work is wasted"
