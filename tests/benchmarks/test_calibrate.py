"""The same requests for a real fleet and for the simulator, before either is started."""

from itertools import pairwise

import pytest

from benchmarks.route_trace.calibrate import (
    REAL_BLOCK,
    SCALE,
    Measured,
    Speed,
    between,
    drift,
    figures,
    simulate,
    simulate_often,
    small_trace,
    token_ids,
)
from benchmarks.route_trace.fleet import at_rate
from benchmarks.route_trace.trace import BLOCK_SIZE


@pytest.fixture(scope="module")
def trace():
    return at_rate(small_trace(60, 3, 20, 12), 3.0)


def test_real_prompts_share_what_simulated_ones_share(trace):
    for one, other in pairwise(sorted(trace, key=lambda r: r.chain)):
        shared = 0
        while shared < min(len(one.chain), len(other.chain)) and (
            one.chain[shared] == other.chain[shared]
        ):
            shared += 1
        first, second = token_ids(one), token_ids(other)
        assert first[: shared * REAL_BLOCK] == second[: shared * REAL_BLOCK]
        longer = (shared + 1) * REAL_BLOCK
        if min(len(one.chain), len(other.chain)) > shared:
            assert first[:longer] != second[:longer]


def test_lengths_are_scaled_and_bounded(trace):
    for request in trace:
        assert request.input_length < 20 * BLOCK_SIZE
        assert 4 <= request.output_length <= 12
        assert abs(len(token_ids(request)) - request.input_length / SCALE) <= 1


def test_the_simulation_is_of_all_requests_and_of_the_measured_speed(trace):
    fast = simulate(trace, Speed(2000, 0.05, 0.02, 0.001), 2, 256)
    slow = simulate(trace, Speed(1000, 0.05, 0.02, 0.001), 2, 256)
    assert len(fast) == len(trace)
    assert all(m.ttft_s > 0.05 for m in fast), "the overhead is in it"
    assert figures(slow)["ttft_mean_s"] > figures(fast)["ttft_mean_s"]
    assert 0 < figures(fast)["hit_rate"] < 1


def test_the_median_of_many_runs_is_near_each_and_the_same_again(trace):
    speed = Speed(2000, 0.05, 0.02, 0.001)
    once = figures(simulate(trace, speed, 2, 256))
    often = simulate_often(trace, speed, 2, 256, seed=1)
    assert often == simulate_often(trace, speed, 2, 256, seed=1)
    assert often.keys() == once.keys()
    assert often["latency_mean_s"] == pytest.approx(once["latency_mean_s"], rel=0.25)


def test_a_machine_that_changed_its_speed_is_seen():
    before, after = Speed(1000, 0.1, 0.02, 0.01), Speed(500, 0.3, 0.05, 0.01)
    assert drift(before, after) == pytest.approx({"prefill": 2.0, "decode": 2.0})
    mean = between(before, after)
    assert mean.prefill_tokens_per_s == pytest.approx(1000 / 1.5), "3 ms for two tokens"
    assert mean.overhead_s == pytest.approx(0.2)
    assert mean.decode_base_s == pytest.approx(0.035)
    assert between(before, before) == before


def test_figures_are_plain_statistics():
    made = figures([Measured(n / 10, n, 1, 4) for n in range(1, 12)])
    assert made["ttft_p50_s"] == pytest.approx(0.6)
    assert made["latency_mean_s"] == pytest.approx(6)
    assert made["hit_rate"] == pytest.approx(0.25)
