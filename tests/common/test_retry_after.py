"""The wait that a refused caller is advised to make."""

import pytest

from services.common.retry_after import retry_after_s


@pytest.mark.parametrize(
    ("requests_ahead", "ended_per_s", "seconds"),
    [(50, 10.0, 5.0), (10**6, 1.0, 60.0), (1, 1000.0, 0.1), (100, 0.0, 1.0)],
)
def test_the_hint_is_the_wait_at_the_measured_rate_within_bounds(
    requests_ahead, ended_per_s, seconds
):
    assert retry_after_s(requests_ahead, ended_per_s) == seconds


def test_bounds_also_hold_for_an_unknown_rate():
    assert retry_after_s(1, 0.0, at_least_s=2.0) == 2.0
    assert retry_after_s(100, 1.0, at_most_s=30.0) == 30.0
    assert retry_after_s(1, 0.0, at_most_s=0.5) == 0.5
