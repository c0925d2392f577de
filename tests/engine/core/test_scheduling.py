"""Policies: order, victims, shares of the prefill budget, retry hints."""

import hypothesis.strategies as st
from hypothesis import given

from services.engine.scheduling import (
    ORDERS,
    PrefillShare,
    Victim,
    choose_victim,
    retry_after_s,
)


def share(remaining: list[int], budget: int) -> list[int]:
    shares = PrefillShare(remaining, budget)
    taken = []
    for own in remaining:
        taken.append(shares.offer(own))
        shares.take(own, taken[-1])
    return taken


def test_orders_by_name():
    requests = [(0, 3, 0), (5, 4, 1), (5, 4, 0), (0, 1, 0)]
    assert sorted(requests, key=lambda r: ORDERS["fcfs"](*r))[0] == (0, 1, 0)
    assert sorted(requests, key=lambda r: ORDERS["priority"](*r))[:2] == [(5, 4, 0), (5, 4, 1)]


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


def test_retry_hints_follow_the_measured_rate():
    assert retry_after_s(100, 10.0) == 5.0
    assert retry_after_s(10**6, 1.0) == 60.0
    assert retry_after_s(1, 1000.0) == 0.1
    assert retry_after_s(100, 0.0) == 1.0
