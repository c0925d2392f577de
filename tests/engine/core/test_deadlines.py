"""Deadlines: who is refused at once, who is ended in the queue, and what is forgotten."""

import itertools
import random
from dataclasses import replace

import pytest

from services.common.errors import DeadlineExceededError, ResourceExhaustedError
from services.engine.compute.simulated_runner import SimulatedModel
from services.engine.contract.messages import AddRequest, CoreRequest
from services.engine.contract.sampling_params import SamplingParams
from services.engine.core.deadlines import Deadlines, refusal
from services.engine.core.request_checks import request_from

QUIET = SimulatedModel(vocab_size=64, max_model_len=512, eos=63)
SLOW = replace(QUIET, token_us=1000.0, max_model_len=4096)
"""At most 1,000 positions per second, on any machine."""


class Clock:
    now_s = 1000.0

    def __call__(self) -> int:
        return int(self.now_s * 1e9)


@pytest.mark.parametrize(
    ("left_s", "own", "ahead", "rate", "error"),
    [
        (1.0, 500, 400, 1000.0, None),
        (1.0, 1001, 0, 1000.0, DeadlineExceededError),
        (1.0, 500, 501, 1000.0, ResourceExhaustedError),
        (0.001, 10**6, 10**6, 0.0, None),
        (-1.0, 1, 0, 1000.0, None),
    ],
)
def test_only_what_is_certain_refuses(left_s, own, ahead, rate, error):
    refused = refusal(left_s, own, ahead, rate)
    assert type(refused) is (error or type(None))
    if error is not None:
        assert refused.reason == "DEADLINE_UNREACHABLE"
        assert refused.metadata["tokens_ahead"] == str(ahead)


def test_the_hint_is_when_the_queue_will_be_short_enough():
    assert refusal(1.0, 500, 4500, 1000.0).retry_after_s == pytest.approx(4.0)
    assert refusal(1.0, 500, 10**9, 1000.0).retry_after_s == 60.0


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def measured(make_driver, clock):
    """An engine that has measured its rate on one prompt of several full rounds."""
    driver = make_driver(SLOW, num_blocks=4000, max_num_batched_tokens=64, now_ns=clock)
    driver.add("first", [3] * 200, max_tokens=1)
    driver.run()
    timer = driver.engine._timer
    assert 0 < timer.best_prefill_tokens_per_s <= 1000
    # A crowded machine would be slower, and then other requests would be refused.
    timer.best_prefill_tokens_per_s = 1000.0
    return driver


def test_a_prompt_that_takes_longer_than_is_left_is_refused(measured, clock):
    long = [n % 60 + 1 for n in range(3000)]
    with pytest.raises(DeadlineExceededError, match="the prompt alone takes"):
        measured.add("late", long, deadline=clock.now_s + 0.5)
    assert not measured.engine.has_unfinished_requests()
    measured.add("in time", long, deadline=clock.now_s + 3600, max_tokens=1)
    measured.run().check_all()


def test_a_cached_prompt_is_not_refused_for_its_length(measured, clock):
    long = [n % 60 + 1 for n in range(3000)]
    measured.add("warm", long, max_tokens=1)
    measured.run()
    measured.add("again", long, deadline=clock.now_s + 0.5, max_tokens=1)
    measured.run().check_all()
    assert measured.cached["again"] == 2999


def test_a_queue_that_takes_longer_than_is_left_refuses_with_a_hint(measured, clock):
    for index in range(20):
        measured.add(f"r{index}", [index + 1] + [5] * 60, max_tokens=1, cache_bypass=True)
    with pytest.raises(ResourceExhaustedError, match="other requests are computed first") as caught:
        measured.add("late", [9] * 10, deadline=clock.now_s + 0.2)
    assert caught.value.retry_after_s > 0
    measured.run().check_all()


def test_a_prefix_that_many_share_counts_once(measured, clock):
    shared = [n % 60 + 1 for n in range(240)]
    for index in range(20):
        measured.add(f"r{index}", [*shared, index + 1], max_tokens=1)
    # 20 times 241 positions would take 4.8 s; what is to be computed takes 0.3 s at the best.
    measured.add("in time", [9] * 70, deadline=clock.now_s + 2.0, max_tokens=1)
    with pytest.raises(ResourceExhaustedError):
        measured.add("late", [8] * 70, deadline=clock.now_s + 0.2)
    measured.run().check_all()


def test_a_short_prompt_does_not_wait_for_a_long_one(measured, clock):
    measured.add("long", [n % 60 + 1 for n in range(3000)], max_tokens=1)
    measured.add("short", [9] * 10, deadline=clock.now_s + 0.5, max_tokens=1)
    measured.run().check_all()


def test_without_a_measured_rate_nobody_is_refused(make_driver, clock):
    driver = make_driver(SLOW, num_blocks=4000, max_num_batched_tokens=64, now_ns=clock)
    # Small rounds show what a round costs, not what a long prompt would.
    driver.add("small", [3] * 20, max_tokens=4)
    driver.run()
    driver.add("long", [5] * 3000, deadline=clock.now_s + 0.1, max_tokens=1)
    clock.now_s += 0.2
    driver.run().check_all()
    assert driver.failures == {"long": "DEADLINE_EXCEEDED"}
    assert not [m for m in driver.marks if m.request_key == "long" and m.verb == "submit"]


def test_what_has_ended_is_forgotten_long_before_its_deadline(make_driver, clock):
    driver = make_driver(QUIET, now_ns=clock)
    for index in range(400):
        driver.add(f"r{index}", [5, 6], max_tokens=1, deadline=clock.now_s + 10**6)
        driver.run()
    assert driver.engine._requests.num_deadlines < 100


def test_each_expires_once_in_order(driver):
    deadlines = Deadlines()
    requests = []
    for index, at in enumerate(random.Random(5).sample(range(100), 30)):
        given = CoreRequest(prompt_token_ids=[1], params=SamplingParams(seed=1))
        message = AddRequest(str(index), given, float(at))
        request = request_from(message, driver.engine._limits, index, itertools.count())
        requests.append(request)
        deadlines.watch(request, len(requests))
    assert requests[3].end_choice()
    passed = [*deadlines.passed(50.0), *deadlines.passed(200.0)]
    assert [r.deadline_unix_s for r in passed] == sorted(r.deadline_unix_s for r in passed)
    assert set(passed) == {r for r in requests if r is not requests[3]}
    assert not list(deadlines.passed(200.0))
