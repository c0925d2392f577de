"""Rounds: what each one gets from the round before, and how long a request waits for its turn."""

from dataclasses import replace

import pytest

from services.engine.compute.simulated_runner import SimulatedModel, SimulatedRunner
from services.engine.contract.runner import SamplingRow
from services.engine.core.worker import Worker

QUIET = SimulatedModel(vocab_size=64, max_model_len=512, eos=63)
LONG = replace(QUIET, max_model_len=16_384)


class Watching(SimulatedRunner):
    """Remembers the steps of both stages, and what each was given."""

    def __init__(self, block_size=4, model=QUIET):
        super().__init__(block_size, model)
        self.forwards: list[tuple[int, int | None, int]] = []
        self.samples: list[tuple[int, list[SamplingRow]]] = []
        self.positions: list[int] = []

    def execute_main_model(self, step, batch, previous):
        self.forwards.append((step, None if previous is None else previous.step, len(batch)))
        self.positions.append(sum(meta.seqlen_q for meta in batch))
        return super().execute_main_model(step, batch, previous)

    def execute_sample(self, step, hidden, rows):
        self.samples.append((step, list(rows)))
        return super().execute_sample(step, hidden, rows)


@pytest.fixture
def runner():
    return Watching()


def watch_plans(driver) -> list:
    plans, schedule = [], driver.engine.scheduler.schedule

    def watched():
        plans.append(schedule())
        return plans[-1]

    driver.engine.scheduler.schedule = watched
    return plans


class TestStepNumbers:
    def test_each_round_is_given_the_tokens_of_the_one_before(self, make_driver, runner):
        driver = make_driver(QUIET, runner=lambda: runner, max_num_batched_tokens=8)
        plans = watch_plans(driver)
        for index in range(3):
            driver.add(f"r{index}", range(1, 8 + index), max_tokens=6, ignore_eos=True)
        results = []
        while driver.engine.has_unfinished_requests():
            results.append(driver.step().step)
        driver.check_all()
        launched = [plan.step for plan in plans if plan.batch]
        assert launched == list(range(1, len(launched) + 1))
        assert [(step, before) for step, before, _ in runner.forwards] == [
            (step, step - 1 or None) for step in launched
        ]
        assert [step for step, _ in runner.samples] == launched
        # A call returns the round before its own; the last call launches none and gathers.
        assert results == [0, *launched]

    def test_numbers_go_on_after_an_idle_time(self, make_driver, runner):
        driver = make_driver(QUIET, runner=lambda: runner)
        for key in ("a", "b"):
            driver.add(key, [1, 2, 3], max_tokens=2, ignore_eos=True)
            driver.run()
        assert [(step, before) for step, before, _ in runner.forwards] == [
            (1, None),
            (2, 1),
            (3, None),
            (4, 3),
        ]

    def test_the_token_in_flight_of_a_sequence_that_has_ended_is_discarded(
        self, make_driver, runner
    ):
        driver = make_driver(QUIET, runner=lambda: runner)
        driver.add("a", [5, 6], max_tokens=50, stop_token_ids=tuple(range(0, 64, 6)))
        driver.run().check_all()
        assert driver.reasons[("a", 0)] == "STOP_TOKEN"
        rows = [row for _, rows in runner.samples for row in rows]
        taken = len(driver.tokens[("a", 0)])
        assert len(rows) == taken + 1
        assert rows[-1].position == 0, "the dead row asks for nothing"
        assert [row.position for row in rows[:-1]] == list(range(2, 2 + taken))

    def test_a_plan_that_assumed_another_length_is_an_error(self, make_driver):
        driver = make_driver(QUIET)
        driver.add("a", [1, 2, 3], max_tokens=9, ignore_eos=True)
        plan = driver.engine.scheduler.schedule()
        (row,) = Worker._correct_seqlens_qk(plan)
        assert row.position == 3
        plan.seqs[0].tokens.append(7)
        with pytest.raises(RuntimeError, match="its plan assumed 3"):
            Worker._correct_seqlens_qk(plan)
        plan.seqs[0].tokens.pop()
        assert driver.abort("a")
        (dead,) = Worker._correct_seqlens_qk(plan)
        assert (dead.position, dead.params.temperature) == (0, 0.0)
        driver.engine.flush_inflight_reqs()

    def test_a_flush_gathers_the_round_in_flight_and_launches_none(self, make_driver, runner):
        driver = make_driver(QUIET, runner=lambda: runner)
        driver.add("a", [1, 2, 3], max_tokens=5, ignore_eos=True)
        driver.engine.step()
        result = driver.engine.flush_inflight_reqs()
        assert (result.step, len(result.outputs)) == (1, 1)
        assert driver.engine.flush_inflight_reqs().step == 0
        assert len(runner.forwards) == 1
        driver.tokens[("a", 0)] += result.outputs[0].token_ids
        driver.releases.update(m.request_key for m in result.marks if m.verb == "release")
        driver.run().check_all()


class TestLongPrompts:
    BUDGET = 128

    @pytest.fixture
    def busy(self, make_driver):
        """One stream runs, a prompt of 50 rounds is being computed, prompts of 4 rounds keep
        coming."""
        runner = Watching(16, LONG)
        driver = make_driver(
            LONG,
            runner=lambda: runner,
            block_size=16,
            num_blocks=2000,
            max_num_batched_tokens=self.BUDGET,
        )
        driver.add("runs", [1, 2], max_tokens=4000, ignore_eos=True)
        for _ in range(3):
            driver.step()
        driver.add("long", [5] * (50 * self.BUDGET), max_tokens=2, ignore_eos=True)
        driver.runner, driver.arrived = runner, 0
        return driver

    def round(self, driver) -> set[str]:
        """One round of the steady load; who got a token."""
        if len(driver.runner.forwards) % 8 == 0:
            driver.arrived += 1
            key = f"four{driver.arrived}"
            driver.add(key, [driver.arrived % 60 + 1] * 4 * self.BUDGET, max_tokens=1)
        return {output.request_key for output in driver.step().outputs}

    def test_a_running_stream_has_a_token_every_round_and_no_round_is_long(self, busy):
        for _ in range(120):
            assert "runs" in self.round(busy)
        assert max(busy.runner.positions) == self.BUDGET
        assert busy.tokens[("long", 0)], "nor is the long prompt starved by those behind it"
        assert busy.arrived > 10
        busy.abort("runs")
        busy.run().check_all()

    def test_a_short_prompt_does_not_wait_for_the_long_ones(self, busy):
        for _ in range(20):
            self.round(busy)
        busy.add("short", [9] * 100, max_tokens=1, ignore_eos=True)
        rounds = 0
        while "short" not in self.round(busy):
            rounds += 1
        # Half of each round's budget is there for it: two rounds, and one until they are returned.
        assert rounds <= 4
        assert not busy.tokens[("long", 0)]
        busy.abort("runs")
        busy.run().check_all()


def test_impossible_requests_fail_at_once_and_the_small_ones_are_served(make_driver):
    """A pool of 640 positions: prompts that need more, answers that grow past it, ten small."""
    driver = make_driver(LONG, num_blocks=40, block_size=16, max_num_batched_tokens=128)
    for index in range(4):
        with pytest.raises(Exception, match="memory holds 640"):
            driver.add(f"big{index}", [5] * 800)
    driver.add("grows", [6] * 560, max_tokens=200, ignore_eos=True)
    for index in range(10):
        driver.add(f"small{index}", [index + 1] * 8, max_tokens=4, ignore_eos=True)
    driver.run().check_all()
    assert driver.reasons[("grows", 0)] == "CONTEXT_FULL"
    assert driver.engine.load().held_blocks == 0


@pytest.mark.parametrize("policy", ["fcfs", "priority", "shortest_prefill", "tenant_fair"])
def test_a_head_that_cannot_run_yet_neither_blocks_nor_starves(make_driver, policy):
    """A prompt that needs nearly all blocks, while small ones never stop coming."""
    driver = make_driver(QUIET, num_blocks=24, max_num_seqs=8, policy=policy)
    driver.add("runs", range(1, 41), max_tokens=20, ignore_eos=True, tenant="a")
    driver.step()
    driver.add("head", [7] * 80, max_tokens=2, ignore_eos=True, tenant="a")
    passed = 0
    for index in range(400):
        key = f"s{index}"
        driver.add(key, [index % 60 + 1, 3], max_tokens=6, ignore_eos=True, tenant="b")
        admitted = {m.request_key for m in driver.step().marks if m.verb == "admit"}
        if "head" in admitted:
            break
        passed += len(admitted)
    else:
        raise AssertionError("the head was never admitted")
    assert passed > 3, "others go on while it waits"
    driver.run().check_all()


def test_every_salt_has_a_cache_of_its_own(make_driver):
    driver = make_driver(num_blocks=200)
    salts = [b"", b"X", b"X\0", b"Y", b"\0X", b"XY"]
    for turn, cached in (("cold", None), ("warm", 60)):
        for index, salt in enumerate(salts):
            key = f"{turn}{index}"
            driver.add(key, [*range(1, 61), 5], salt=salt, max_tokens=1, ignore_eos=True)
            driver.run()
            assert driver.cached.get(key) == cached, (key, salt)
    driver.check_all()
