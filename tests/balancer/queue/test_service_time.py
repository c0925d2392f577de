"""Service times: answered and unfinished requests, their mean and their spread."""

import pytest

from services.balancer.queue.service_time import ServiceTime


def test_short_answers_after_long_prompts_show_nothing_about_long_answers():
    times = ServiceTime()
    assert times.mean_s(128) == 0.0
    for _ in range(100):
        times.record_answer(2.0, 1)
    assert times.mean_s(1) == times.mean_s(128) == pytest.approx(2.0)
    for _ in range(500):
        times.record_answer(4.0, 100)
    assert times.mean_s(100) == pytest.approx(4.0, rel=0.01)
    assert times.mean_s(50) == pytest.approx(2.0, rel=0.01)


def test_an_unfinished_request_took_at_least_that_long():
    times = ServiceTime()
    times.record_unfinished(4.0, 10)
    assert times.mean_s(10) == pytest.approx(4.0), "nothing was answered, yet a bound is known"
    times.record_unfinished(1.0, 10)
    assert times.mean_s(10) == pytest.approx(4.0), "a caller that left early shows nothing"
    for _ in range(500):
        times.record_answer(2.0, 10)
    assert times.mean_s(10) == pytest.approx(2.0, rel=0.01)


def test_few_requests_exceed_the_upper_bound():
    times = ServiceTime()
    assert times.upper_bound_s(10) == 0.0
    for i in range(500):
        times.record_answer(1.0 + i % 2, 10)
    assert times.mean_s(10) == pytest.approx(1.5, rel=0.02)
    assert times.upper_bound_s(10) == pytest.approx(2.5, rel=0.02)
    assert times.upper_bound_s(5) == pytest.approx(1.25, rel=0.02)
