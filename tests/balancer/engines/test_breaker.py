"""The breaker's states over an imagined clock."""

from services.balancer.engines.breaker import MAX_OPEN_S, Breaker, BreakerState


def test_failures_in_a_row_open_it():
    breaker = Breaker(failures=3, open_s=1)
    breaker.failed(0)
    breaker.failed(0)
    breaker.succeeded()
    breaker.failed(0)
    breaker.failed(0)
    assert breaker.admits(0)
    breaker.failed(0)
    assert not breaker.admits(0.9)
    assert breaker.state(0.9) is BreakerState.OPEN


def test_half_open_admits_one_try():
    breaker = Breaker(failures=1, open_s=1)
    breaker.failed(0)
    assert breaker.admits(1)
    breaker.began(1)
    assert not breaker.admits(1)
    breaker.succeeded()
    assert breaker.admits(1)
    assert breaker.state(1) is BreakerState.CLOSED


def test_a_failed_try_doubles_the_time_up_to_a_limit():
    breaker = Breaker(failures=1, open_s=1)
    now = 0.0
    breaker.failed(now)
    for length in (1, 2, 4, 8, 16, 30, 30):
        assert not breaker.admits(now + length - 0.01)
        now += length
        assert breaker.admits(now)
        breaker.began(now)
        breaker.failed(now)
    assert length == MAX_OPEN_S


def test_a_try_that_tells_nothing_leaves_room_for_another():
    breaker = Breaker(failures=1, open_s=1)
    breaker.failed(0)
    breaker.began(1)
    breaker.undecided()
    assert breaker.admits(1)
    assert breaker.state(1) is BreakerState.HALF_OPEN


def test_streams_that_break_together_count_once():
    breaker = Breaker(failures=1, open_s=1)
    for _ in range(32):
        breaker.failed(0)
    assert breaker.admits(1)
