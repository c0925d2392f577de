"""Policies: order, victims, shares of the prefill budget."""

import hypothesis.strategies as st
from hypothesis import given

from services.engine.contract.config import POLICIES as NAMES
from services.engine.scheduling.policies import (
    AGE_TOKENS,
    POLICIES,
    PrefillShare,
    Standing,
    TenantCounters,
    Victim,
    choose_victim,
    in_turn,
)


def share(remaining: list[int], budget: int) -> list[int]:
    shares = PrefillShare(remaining, budget)
    taken = []
    for own in remaining:
        taken.append(shares.offer(own))
        shares.take(own, taken[-1])
    return taken


def ranked(policy: str, *standings: tuple[int, ...]) -> list[Standing]:
    return sorted((Standing(*s) for s in standings), key=POLICIES[policy].order)


def test_orders_by_name():
    requests = [(0, 3, 0), (5, 4, 1), (5, 4, 0), (0, 1, 0)]
    assert ranked("fcfs", *requests)[0] == (0, 1, 0, 0)
    assert ranked("priority", *requests)[:2] == [(5, 4, 0, 0), (5, 4, 1, 0)]
    assert tuple(POLICIES) == NAMES


def test_the_shortest_prefill_goes_first():
    assert [s.arrival for s in ranked("shortest_prefill", (0, 0, 0, 900), (0, 1, 0, 10))] == [1, 0]
    assert [s.choice for s in ranked("shortest_prefill", (0, 0, 1, 9), (0, 0, 0, 9))] == [0, 1]


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=200), st.data())
def test_a_long_prefill_is_overtaken_a_bounded_number_of_times(lengths, data):
    own = data.draw(st.integers(0, len(lengths) - 1))
    order = ranked("shortest_prefill", *((0, i, 0, n) for i, n in enumerate(lengths)))
    ahead = order[: [s.arrival for s in order].index(own)]
    later = sum(s.arrival > own for s in ahead)
    assert later <= lengths[own] // AGE_TOKENS


def test_tenants_take_turns_by_what_was_computed_for_them():
    lines = {"a": [5, 5, 5], "b": [2, 2, 2, 2], "c": []}
    merged = list(in_turn({"a": 0, "b": 4}, lines, lambda cost: cost))
    assert merged == [5, 2, 5, 2, 2, 5, 2]
    assert list(in_turn({}, {}, lambda cost: cost)) == []


def test_a_new_tenant_starts_at_the_lowest_counter():
    tenants = TenantCounters()
    tenants.enter("a")
    tenants.charge("a", 100)
    tenants.enter("b")
    assert tenants.counts == {"a": 100, "b": 100}
    tenants.charge("b", 50)
    tenants.leave("b")
    tenants.enter("b")
    assert tenants.counts["b"] == 150, "what it is ahead is not forgotten by leaving"
    tenants.leave("b")
    tenants.charge("a", 80)
    tenants.enter("b")
    assert tenants.counts["b"] == 180, "nothing is saved up while away"
    tenants.leave("a")
    tenants.leave("b")
    assert tenants.counts == {}


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 300)), min_size=1, max_size=120),
    st.integers(0, 20),
)
def test_tenants_that_wait_are_served_alike(requests, early):
    """One at a time: no tenant that waits is ever more than one request ahead of another."""
    tenants, lines, longest = TenantCounters(), {}, max(cost for _, cost in requests)
    arrivals = list(requests)
    for turn in range(len(requests)):
        for name, cost in [arrivals.pop(0) for _ in range(min(len(arrivals), early + 1))]:
            tenants.enter(name)
            lines.setdefault(name, []).append(cost)
        waiting = [tenants.counts[name] for name, line in lines.items() if line]
        assert max(waiting) - min(waiting) <= longest, turn
        pairs = {name: [(name, cost) for cost in line] for name, line in lines.items()}
        name, cost = next(in_turn(tenants.counts, pairs, lambda pair: pair[1]))
        assert tenants.counts[name] == min(waiting)
        lines[name].pop(0)
        tenants.charge(name, cost)
        tenants.leave(name)
    assert tenants.counts == {}


def test_short_prompts_go_first_come_first_served():
    assert share([100, 100, 100], 250) == [100, 100, 50]


def test_a_long_prompt_leaves_half_to_a_short_one_behind_it():
    assert share([5000, 100], 512) == [412, 100]
    assert share([5000, 400], 512) == [256, 256]
    assert share([5000, 4000], 512) == [512, 0]
    assert share([5000], 512) == [512]


@given(st.lists(st.integers(1, 2000), max_size=8), st.integers(0, 600))
def test_a_share_is_never_more_than_there_is_and_nothing_is_wasted(remaining, budget):
    taken = share(remaining, budget)
    assert all(0 <= t <= r for t, r in zip(taken, remaining, strict=True))
    assert sum(taken) == min(budget, sum(remaining))


def test_the_victim_loses_the_least_work_per_block():
    cheap = Victim(1, 0, lost_tokens=10, freed_blocks=2, arrival=1)
    dear = Victim(2, 0, lost_tokens=100, freed_blocks=2, arrival=2)
    assert choose_victim([dear, cheap]) == 1
    assert choose_victim([dear, cheap._replace(freed_blocks=0)]) == 2
    assert choose_victim([dear, cheap._replace(priority=1)]) == 2
    assert choose_victim([]) is None


def test_the_youngest_of_equals_is_the_victim():
    assert choose_victim([Victim(i, 0, 8, 2, arrival=i) for i in range(3)]) == 2
