"""How long an engine has a request: what ended, what did not, and how much they differ."""

import pytest

from services.balancer.queue.drain_rate import ServiceTime


def test_short_answers_after_long_prompts_say_nothing_of_long_answers():
    times = ServiceTime()
    assert times.of(128) == 0.0
    for _ in range(100):
        times.served(2.0, 1)
    assert times.of(1) == times.of(128) == pytest.approx(2.0)
    for _ in range(500):
        times.served(4.0, 100)
    assert times.of(100) == pytest.approx(4.0, rel=0.01)
    assert times.of(50) == pytest.approx(2.0, rel=0.01)


def test_what_did_not_end_in_time_took_at_least_that_long():
    times = ServiceTime()
    times.lasted(4.0, 10)
    assert times.of(10) == pytest.approx(4.0), "nothing was ever answered, and something is known"
    times.lasted(1.0, 10)
    assert times.of(10) == pytest.approx(4.0), "a caller that left early says nothing"
    for _ in range(500):
        times.served(2.0, 10)
    assert times.of(10) == pytest.approx(2.0, rel=0.01)


def test_few_requests_take_longer_than_surely():
    times = ServiceTime()
    assert times.surely(10) == 0.0
    for i in range(500):
        times.served(1.0 + i % 2, 10)
    assert times.of(10) == pytest.approx(1.5, rel=0.02)
    assert times.surely(10) == pytest.approx(2.5, rel=0.02)
    assert times.surely(5) == pytest.approx(1.25, rel=0.02)
