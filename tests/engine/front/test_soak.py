"""Requests of every kind through one engine process: all end as they must, nothing is left."""

import pytest

from tests.soak.__main__ import KINDS, points_of, soak

RUNS_GROW_MIB = 24
"""What allocators may still take after the first tenth of a long run …"""
HALF_GROWS_MIB = 8
"""… and after its first half."""


def check_answers(result) -> None:
    assert sum(result.outcomes.values()) == result.requests
    assert set(result.outcomes) <= {"OK", "left", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT"}
    assert result.outcomes["INVALID_ARGUMENT"] == result.kinds["bad"]
    harmless = {"left": "cancelled", "DEADLINE_EXCEEDED": "deadline", "INVALID_ARGUMENT": "bad"}
    for outcome, kind in harmless.items():
        assert 0 < result.outcomes[outcome] <= result.kinds[kind]
    assert set(result.kinds) == set(KINDS)
    assert result.preemptions > 0
    assert result.cached_tokens > 0
    for state in result.states:
        assert (state.held_blocks, state.waiting, state.running) == (0, 0, 0)


@pytest.mark.timeout(240)
async def test_a_short_run_ends_as_it_must():
    result = await soak(160, points=[80, 160])
    check_answers(result)
    first, last = result.states
    assert last.descriptors == first.descriptors
    assert last.threads == first.threads


@pytest.mark.verify
@pytest.mark.timeout(3600)
async def test_ten_thousand_requests_leave_no_trace():
    result = await soak(10_000, points=points_of(10_000))
    check_answers(result)
    early, half, last = result.states
    assert last.descriptors == early.descriptors
    assert last.threads == early.threads
    for place, end_mib in enumerate(last.rss_mib):
        assert end_mib - early.rss_mib[place] <= RUNS_GROW_MIB
        assert end_mib - half.rss_mib[place] <= HALF_GROWS_MIB
