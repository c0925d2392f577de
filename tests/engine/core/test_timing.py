"""Measured rates: rounds of either kind, and how fast the queue drains."""

import pytest

from services.engine.core.timing import RoundTimer


@pytest.fixture
def now():
    return [0.0]


@pytest.fixture
def timer(now):
    return RoundTimer(lambda: now[0])


def test_nothing_is_claimed_before_the_first_measurement(timer):
    assert (timer.prefill_tokens_per_s, timer.decode_round_s) == (0.0, 0.0)
    assert timer.drain_requests_per_s == 0.0


def test_a_mixed_round_pays_for_its_decodes_first(timer):
    timer.observe_round(0, 8, 0.1)
    timer.observe_round(100, 8, 0.6)
    assert timer.decode_round_s == pytest.approx(0.1)
    assert timer.prefill_tokens_per_s == pytest.approx(200.0)


def test_averages_follow_a_change(timer):
    timer.observe_round(0, 1, 0.1)
    for _ in range(40):
        timer.observe_round(0, 1, 0.2)
    assert timer.decode_round_s == pytest.approx(0.2, rel=0.01)


def test_the_drain_rate_forgets_what_is_old(timer, now):
    for _ in range(20):
        now[0] += 0.1
        timer.observe_admission()
    now[0] += 0.1
    assert timer.drain_requests_per_s == pytest.approx(10.0, rel=0.1)
    now[0] += 60.0
    assert timer.drain_requests_per_s == 0.0
    for _ in range(1000):
        timer.observe_admission()
    assert timer.drain_requests_per_s > 0


def test_the_best_rate_is_that_of_full_rounds_and_falls_slowly():
    timer = RoundTimer(lambda: 0.0, sample_tokens=64)
    timer.observe_round(8, 0, 0.5)
    assert timer.best_prefill_tokens_per_s == 0.0
    timer.observe_round(64, 0, 0.064)
    timer.observe_round(64, 0, 0.640)
    assert 100 < timer.best_prefill_tokens_per_s < 1000
    timer.observe_round(128, 0, 0.064)
    assert timer.best_prefill_tokens_per_s == pytest.approx(2000.0)
    for _ in range(60):
        timer.observe_round(64, 0, 0.640)
    assert timer.best_prefill_tokens_per_s == pytest.approx(100.0, rel=0.01)
