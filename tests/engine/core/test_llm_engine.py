"""The engine's promises one by one: overlap, endings, cancels, deadlines, limits, choices."""

import threading
from dataclasses import replace

import pytest

from services.common.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnimplementedError,
)
from services.engine.compute.simulated_runner import SimulatedModel, SimulatedRunner
from services.engine.contract.runner import SamplerOutput
from services.engine.contract.sampling_params import Constraint
from services.engine.scheduling.scheduler import MAX_PASSED_OVER

QUIET = SimulatedModel(vocab_size=64, max_model_len=512, eos=63)


class GatedRunner(SimulatedRunner):
    """Forwards from the second on wait until the test lets them go."""

    def __init__(self):
        super().__init__(4, QUIET)
        self.gate = threading.Semaphore(1)

    def execute_main_model(self, step, batch, previous):
        assert self.gate.acquire(timeout=30)
        return super().execute_main_model(step, batch, previous)


class SpoiltRunner(SimulatedRunner):
    """Reports rows as not finite or empty in chosen rounds."""

    def __init__(self, nan=(), empty=()):
        super().__init__(4, QUIET)
        self.nan, self.empty = nan, empty

    def execute_sample(self, step, hidden, rows):
        drawn = super().execute_sample(step, hidden, rows)
        return SamplerOutput(
            step=step,
            tokens=drawn.tokens,
            nan_rows=(0,) if step in self.nan else (),
            empty_rows=(0,) if step in self.empty else (),
        )


def test_tokens_of_a_round_come_back_before_the_next_forward_ends(make_driver):
    runner = GatedRunner()
    driver = make_driver(QUIET, runner=lambda: runner)
    driver.add("a", range(1, 6), max_tokens=3, ignore_eos=True)
    assert driver.step().outputs == []
    # Forward 2 cannot end, its gate is closed. The token of round 1 is here nevertheless.
    result = driver.step()
    assert [len(output.token_ids) for output in result.outputs] == [1]
    assert result.step == 1
    assert not driver.engine.worker.forward_done
    runner.gate.release(5)
    driver.run().check_all()


def test_a_sequence_that_reaches_its_limit_in_flight_is_not_scheduled_again(make_driver):
    batches = []

    class Watching(SimulatedRunner):
        def execute_main_model(self, step, batch, previous):
            batches.append(len(batch))
            return super().execute_main_model(step, batch, previous)

    driver = make_driver(QUIET, runner=lambda: Watching(4, QUIET))
    driver.add("a", range(1, 6), max_tokens=3, ignore_eos=True)
    driver.run().check_all()
    assert batches == [1, 1, 1]


@pytest.mark.parametrize(
    "fields",
    [
        {"max_num_batched_tokens": 3},
        {"prefix_cache": False},
        {"num_blocks": 12},
        {"max_num_seqs": 1},
    ],
)
def test_chunks_cache_memory_and_batch_do_not_change_tokens(make_driver, fields):
    driver = make_driver(QUIET, **fields)
    for index in range(6):
        driver.add(f"r{index}", range(1, 16 + index), max_tokens=20, temperature=1.0, seed=index)
    driver.run().check_all()


def test_a_short_memory_preempts_and_says_so(make_driver):
    driver = make_driver(QUIET, num_blocks=12)
    for index in range(4):
        driver.add(f"r{index}", range(1, 9), max_tokens=24, ignore_eos=True)
    driver.run().check_all()
    preempted = [m for m in driver.marks if m.preempted]
    assert preempted
    # The first to arrive is never the one that gives way.
    assert "r0" not in {m.request_key for m in preempted}


def test_a_warm_prefix_is_reported_and_not_computed_again(driver):
    driver.add("cold", range(1, 31), max_tokens=2, ignore_eos=True)
    driver.run()
    driver.marks.clear()
    driver.add("warm", range(1, 31), max_tokens=2, ignore_eos=True)
    driver.run().check_all()
    assert driver.cached == {"warm": 28}
    chunks = [m for m in driver.marks if m.verb == "submit"]
    assert [(c.start, c.tokens) for c in chunks] == [(28, 2)]


def test_choices_share_the_prompt_and_draw_their_own_tokens(driver):
    driver.add("a", range(1, 31), n=4, temperature=1.0, max_tokens=8, ignore_eos=True)
    most = 0
    while driver.engine.has_unfinished_requests():
        driver.step()
        most = max(most, driver.engine.load().held_blocks)
    driver.check_all()
    assert len({tuple(driver.tokens[("a", c)]) for c in range(4)}) == 4
    # Seven full blocks are shared; four times the prompt and its answers would be 40 blocks.
    assert most <= 7 + 4 * 4


def test_prompt_logprobs_have_one_entry_per_prompt_token_but_the_first(make_driver):
    driver = make_driver(QUIET, max_num_batched_tokens=7)
    for key in ("cold", "warm"):
        driver.add(key, range(1, 31), max_tokens=2, prompt_logprobs=True, logprobs=True)
        driver.run()
    for key in ("cold", "warm"):
        entries = driver.prompt_logprobs[key]
        assert [entry.token_id for entry in entries] == list(range(2, 31))
        assert [entry.logprob for entry in entries] == [-float(p) for p in range(1, 30)]


class TestEndings:
    def test_min_tokens_hold_back_every_end(self, driver):
        driver.add("a", [3, 1], max_tokens=40, min_tokens=30, stop_token_ids=tuple(range(1, 20)))
        driver.run().check_all()
        assert len(driver.tokens[("a", 0)]) > 30
        assert not set(driver.tokens[("a", 0)][:30]) & set(range(20))

    def test_the_context_ends_what_nothing_else_ends(self, make_driver):
        driver = make_driver(QUIET, max_model_len=20)
        for left in (1, 2):
            driver.add(f"left{left}", range(1, 21 - left), ignore_eos=True)
        driver.run().check_all()
        assert {driver.reasons[(f"left{n}", 0)] for n in (1, 2)} == {"CONTEXT_FULL"}
        assert [len(driver.tokens[(f"left{n}", 0)]) for n in (1, 2)] == [1, 2]

    def test_one_that_outgrows_the_memory_ends_and_frees_it(self, make_driver):
        driver = make_driver(QUIET, num_blocks=10)
        driver.add("a", range(1, 30), max_tokens=200, ignore_eos=True)
        driver.run().check_all()
        assert driver.reasons[("a", 0)] == "CONTEXT_FULL"

    @pytest.mark.parametrize(
        ("runner", "code"),
        [
            (lambda: SpoiltRunner(nan=(2,)), "DATA_LOSS"),
            (lambda: SpoiltRunner(empty=(2,)), "FAILED_PRECONDITION"),
        ],
    )
    def test_a_row_without_a_token_ends_its_request_alone(self, make_driver, runner, code):
        driver = make_driver(QUIET, runner=runner)
        driver.add("bad", range(1, 9), max_tokens=9, ignore_eos=True)
        driver.add("good", range(9, 19), max_tokens=9, ignore_eos=True)
        driver.run().check_all()
        assert driver.failures == {"bad": code}

    def test_nothing_computed_before_bad_values_is_reused(self, make_driver):
        driver = make_driver(QUIET, runner=lambda: SpoiltRunner(nan=(1,)))
        driver.add("bad", range(1, 18), max_tokens=9)
        driver.run()
        driver.add("again", range(1, 18), max_tokens=2)
        driver.run().check_all()
        assert "again" not in driver.cached

    def test_a_prompt_with_bad_values_in_a_block_ends_before_it_samples(self, make_driver):
        """They are 0 now, so its own rows would be finite, and wrong."""

        class Spoilt(SimulatedRunner):
            def execute_main_model(self, step, batch, previous):
                self.blocks = batch[-1].block_table[:1]
                return super().execute_main_model(step, batch, previous)

            def execute_sample(self, step, hidden, rows):
                output = super().execute_sample(step, hidden, rows)
                bad = {"nan_rows": (0,), "nan_blocks": self.blocks} if step == 2 else {}
                return replace(output, **bad)

        driver = make_driver(QUIET, runner=lambda: Spoilt(4, QUIET), max_num_batched_tokens=12)
        for key, prompt in (("bad", [1, 2, 3]), ("good", [4, 5, 6])):
            driver.add(key, prompt, max_tokens=9, ignore_eos=True)
        driver.add("long", range(7, 50), n=2, max_tokens=3)
        driver.run().check_all()
        assert driver.failures == {"bad": "DATA_LOSS", "long": "DATA_LOSS"}


class TestAborts:
    @pytest.mark.parametrize("steps", range(7))
    def test_a_cancel_in_any_state_frees_everything_within_two_rounds(self, make_driver, steps):
        driver = make_driver(QUIET, max_num_batched_tokens=8, max_num_seqs=1)
        driver.add("a", range(1, 31), max_tokens=400, ignore_eos=True)
        driver.add("queued", range(1, 31), max_tokens=4)
        for _ in range(steps):
            driver.step()
        assert driver.abort("a")
        assert driver.abort("queued")
        for _ in range(2):
            driver.step()
        assert driver.engine.load().held_blocks == 0
        assert not driver.engine.has_unfinished_requests()
        driver.check_all()

    def test_a_second_cancel_and_one_of_a_stranger_do_nothing(self, driver):
        driver.add("a", range(1, 9), max_tokens=4)
        assert driver.abort("a")
        assert not driver.abort("a")
        assert not driver.abort("stranger")
        driver.run().check_all()

    def test_one_choice_can_end_alone(self, driver):
        driver.add("a", range(1, 9), n=3, max_tokens=12, temperature=1.0, ignore_eos=True)
        for _ in range(5):
            driver.step()
        assert driver.abort("a", 1)
        driver.run().check_all()
        assert set(driver.reasons) == {("a", 0), ("a", 2)}


class TestAdmission:
    def test_expired_work_is_dropped_before_prefill(self, make_driver):
        now = [100.0]
        driver = make_driver(QUIET, max_num_seqs=1, now_ns=lambda: int(now[0] * 1e9))
        driver.add("runs", range(1, 9), max_tokens=30, ignore_eos=True)
        driver.add("waits", range(1, 9), max_tokens=3, deadline=105.0)
        driver.step()
        now[0] = 106.0
        driver.run().check_all()
        assert driver.failures == {"waits": "DEADLINE_EXCEEDED"}
        assert not [m for m in driver.marks if m.request_key == "waits" and m.verb == "submit"]

    def test_a_full_queue_refuses_with_a_hint(self, make_driver):
        driver = make_driver(QUIET, max_num_seqs=1, max_waiting=2)
        for index in range(3):
            driver.add(f"r{index}", range(1, 9), max_tokens=3)
        with pytest.raises(ResourceExhaustedError) as caught:
            driver.add("one too many", range(1, 9), max_tokens=3)
        assert caught.value.retry_after_s > 0
        driver.run().check_all()

    def test_what_can_never_fit_is_refused_at_once(self, make_driver):
        driver = make_driver(replace(QUIET, max_model_len=4096), num_blocks=40, block_size=16)
        small = [f"small{i}" for i in range(10)]
        for index in range(4):
            with pytest.raises(InvalidArgumentError, match="memory holds 640") as caught:
                driver.add(f"big{index}", [5] * 500 + [6] * 300)
            assert caught.value.violations[0].field == "token_ids"
        for key in small:
            driver.add(key, range(1, 9), max_tokens=4)
        driver.run().check_all()

    @pytest.mark.parametrize("length", [512, 513, 5120])
    def test_a_prompt_that_leaves_no_room_is_refused_by_both_numbers(self, make_driver, length):
        driver = make_driver(QUIET, num_blocks=200)
        with pytest.raises(InvalidArgumentError, match=f"{length} tokens.*512") as caught:
            driver.add("a", [1] * length)
        assert caught.value.reason == "CONTEXT_LENGTH_EXCEEDED"
        assert not driver.engine.has_unfinished_requests()

    @pytest.mark.parametrize(
        ("prompt", "params", "error"),
        [
            ([], {}, InvalidArgumentError),
            ([64], {}, InvalidArgumentError),
            ([-1], {}, InvalidArgumentError),
            ([1], {"temperature": -1.0}, InvalidArgumentError),
            ([1], {"top_p": 0.0}, InvalidArgumentError),
            ([1], {"constraint": Constraint("regex", "a")}, UnimplementedError),
        ],
    )
    def test_bad_requests_name_a_field_and_leave_no_trace(self, driver, prompt, params, error):
        with pytest.raises(error) as caught:
            driver.add("a", prompt, **params)
        assert caught.value.violations[0].field
        assert not driver.engine.has_unfinished_requests()

    def test_a_key_in_use_is_refused_and_the_first_goes_on(self, driver):
        driver.add("a", range(1, 9), max_tokens=4)
        with pytest.raises(AlreadyExistsError):
            driver.add("a", range(1, 5), max_tokens=9)
        driver.run().check_all()

    def test_a_long_prompt_starves_neither_decodes_nor_short_prompts(self, make_driver):
        driver = make_driver(QUIET, num_blocks=300, max_num_batched_tokens=8)
        driver.add("runs", [1, 2], max_tokens=80, ignore_eos=True)
        for _ in range(3):
            driver.step()
        driver.add("long", range(1, 60), max_tokens=2)
        driver.add("long2", [9] * 300, max_tokens=2)
        driver.add("short", [4, 5, 6], max_tokens=2, ignore_eos=True)
        for _ in range(5):
            # Each round gives the running stream its token.
            assert "runs" in {output.request_key for output in driver.step().outputs}
        assert driver.tokens[("short", 0)]
        assert not driver.tokens[("long2", 0)]
        driver.run().check_all()

    def test_others_pass_one_that_does_not_fit_but_not_for_ever(self, make_driver):
        driver = make_driver(QUIET, num_blocks=20, max_num_seqs=8)
        driver.add("runs", range(1, 41), max_tokens=30, ignore_eos=True)
        driver.step()
        driver.add("big", [7] * 60, max_tokens=2, ignore_eos=True)
        for index in range(60):
            driver.add(f"s{index}", [index % 60 + 1, 3], max_tokens=2, ignore_eos=True)
        order = []
        while driver.engine.has_unfinished_requests():
            order += [m.request_key for m in driver.step().marks if m.verb == "admit"]
        driver.check_all()
        assert order.index("big") == MAX_PASSED_OVER

    def test_choices_that_wait_for_their_prompt_hold_nobody_up(self, make_driver):
        driver = make_driver(QUIET, max_num_batched_tokens=16, num_blocks=300)
        for index in range(3):
            driver.add(f"n{index}", [index + 1] * 200, n=16, max_tokens=1)
        driver.add("short", [9, 8, 7], max_tokens=2, ignore_eos=True)
        for _ in range(4):
            driver.step()
        assert driver.tokens[("short", 0)]
        driver.run().check_all()

    def test_the_highest_priority_is_admitted_first(self, make_driver):
        driver = make_driver(QUIET, policy="priority", max_num_seqs=1)
        for priority in (0, 1, 2):
            driver.add(f"p{priority}", range(1, 5), priority=priority, max_tokens=2)
        driver.run().check_all()
        admitted = [m.request_key for m in driver.marks if m.verb == "admit"]
        assert admitted == ["p2", "p1", "p0"]


class TestContinuation:
    def test_continued_tokens_count_and_are_not_output_again(self, driver):
        driver.add("whole", range(1, 9), max_tokens=10, ignore_eos=True, temperature=1.0)
        driver.run()
        tokens = driver.tokens[("whole", 0)]
        driver.add(
            "rest",
            range(1, 9),
            continued=[tokens[:4]],
            max_tokens=10,
            ignore_eos=True,
            temperature=1.0,
        )
        driver.run().check_all()
        assert driver.tokens[("rest", 0)] == tokens[4:]

    def test_an_abort_drops_an_end_that_was_not_returned_yet(self, driver):
        """Choice 1 had all its tokens elsewhere; its end waits for the next step."""
        driver.add("a", range(1, 9), n=2, continued=[[1], [1, 2, 3]], max_tokens=3)
        assert driver.abort("a")
        assert driver.step().outputs == []
        driver.run().check_all()

    def test_one_that_has_reached_its_end_ends_without_work(self, driver):
        driver.add("done", range(1, 9), continued=[[1, 2, 3]], max_tokens=3)
        driver.run().check_all()
        assert driver.reasons[("done", 0)] == "MAX_TOKENS"
        assert not [m for m in driver.marks if m.verb == "submit"]


def test_marks_tell_a_request_in_five_verbs(make_driver):
    driver = make_driver(QUIET, max_num_batched_tokens=8)
    driver.add("a", range(1, 20), max_tokens=3, ignore_eos=True)
    driver.run().check_all()
    verbs = [(m.verb, m.tokens) for m in driver.marks]
    assert verbs == [
        ("enqueue", None),
        ("admit", None),
        ("submit", 8),
        ("submit", 8),
        ("submit", 3),
        ("collect", None),
        ("collect", 3),
        ("release", None),
    ]
    times = [m.unix_ns for m in driver.marks]
    assert times == sorted(times)
