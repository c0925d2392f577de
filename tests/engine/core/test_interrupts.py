"""An interrupt or an error anywhere in `LLM.generate`: the next call works or says it is closed."""

import sys
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

import services.engine.offline.llm
from services.engine.compute.simulated_runner import SimulatedModel, SimulatedRunner
from services.engine.contract.sampling_params import SamplingParams
from services.engine.offline.llm import LLM

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = [[n, 2, 3] for n in range(1, 10)]
ENGINE = str(Path(services.engine.offline.llm.__file__).parents[1])
MODEL = SimulatedModel(vocab_size=256, eos=255)


def make(runner=None):
    simulate = "vocab_size=256,eos=255"
    return LLM(simulate=simulate, runner=runner, num_blocks=60, block_size=4, max_num_seqs=4)


def answers(llm, prompts=PROMPTS):
    return [o.choices[0].token_ids for o in llm.generate(prompts, GREEDY)]


@pytest.fixture(scope="module")
def expected():
    with make() as llm:
        return answers(llm)


def interrupt_waits(monkeypatch, *at):
    """KeyboardInterrupt instead of these waits of the calling thread; returns the count so far."""
    seen, me, result = [0], threading.get_ident(), Future.result

    def interrupted(self, timeout=None):
        if threading.get_ident() == me:
            seen[0] += 1
            if seen[0] in at:
                raise KeyboardInterrupt
        return result(self, timeout)

    monkeypatch.setattr(Future, "result", interrupted)
    return seen


def interrupt_launch(monkeypatch, llm, rounds):
    """KeyboardInterrupt instead of a launch, after so many rounds."""
    worker, left = llm.engine.worker, iter(range(rounds))
    launch = worker.launch

    def interrupted(*args):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return launch(*args)

    monkeypatch.setattr(worker, "launch", interrupted)


@pytest.fixture(scope="module")
def num_waits():
    with make() as llm, pytest.MonkeyPatch.context() as patch:
        seen = interrupt_waits(patch)
        answers(llm)
    assert seen[0] > 20
    return seen[0]


def test_after_an_interrupt_of_any_wait_the_engine_is_whole(expected, num_waits):
    with make() as llm:
        for at in range(1, num_waits + 1):
            with pytest.MonkeyPatch.context() as patch:
                interrupt_waits(patch, at)
                with pytest.raises(KeyboardInterrupt):
                    answers(llm)
            llm.engine.check_integrity()
            assert not llm.engine.has_unfinished_requests()
            assert llm.engine.load().held_blocks == 0
        assert answers(llm) == expected


@pytest.mark.parametrize("rounds", range(5))
def test_a_round_that_was_planned_and_never_launched_holds_nothing(monkeypatch, expected, rounds):
    with make() as llm:
        interrupt_launch(monkeypatch, llm, rounds)
        with pytest.raises(KeyboardInterrupt):
            answers(llm)
        monkeypatch.undo()
        assert answers(llm) == expected
        llm.engine.check_integrity()


@pytest.mark.parametrize("rounds", range(4))
def test_a_round_that_was_never_launched_holds_no_slot_of_state(monkeypatch, rounds):
    """It would have restored, saved and taken over snapshots of the first call."""
    prompts = [[n, *range(2, 9)] for n in range(1, 7)]
    fields = {"num_blocks": 60, "block_size": 4, "max_num_seqs": 4, "state_slots": 5}
    with LLM(simulate="vocab_size=256,eos=255,state_boundary=4", **fields) as llm:
        expected = answers(llm, prompts)
        interrupt_launch(monkeypatch, llm, rounds)
        with pytest.raises(KeyboardInterrupt):
            answers(llm, prompts)
        monkeypatch.undo()
        llm.engine.check_integrity()
        assert llm.engine._blocks.states.slots.num_held == 0
        assert answers(llm, prompts) == expected


@pytest.mark.parametrize("at", [1, 2, 5, 6])
def test_a_second_interrupt_while_the_first_is_put_right_closes(monkeypatch, at):
    llm = make()
    interrupt_waits(monkeypatch, at, at + 1)
    with pytest.raises(KeyboardInterrupt):
        answers(llm)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="LLM is closed"):
        answers(llm)


def test_a_step_that_was_cut_short_is_ended_by_the_next(monkeypatch, make_driver):
    driver = make_driver(MODEL)
    for index in range(3):
        driver.add(f"r{index}", [1, 2, 3 + index], max_tokens=6, ignore_eos=True)
    driver.step()
    interrupt_waits(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt):
        driver.step()
    monkeypatch.undo()
    assert driver.engine.worker.interrupted
    driver.run().check_all()


def test_an_interrupt_of_any_line_leaves_a_usable_or_a_closed_engine(expected):
    closed, at, stride = [], 1, 211
    while True:
        with make() as llm:
            if not interrupt_line(at, lambda llm=llm: answers(llm)):
                break
            try:
                assert answers(llm) == expected
                llm.engine.check_integrity()
            except RuntimeError as error:
                closed.append(str(error))
        at += stride
    assert at > 20 * stride
    assert len(closed) * stride < at / 5, "most interrupts can be gone on from"
    assert all("LLM is closed: KeyboardInterrupt" in reason for reason in closed)


def interrupt_line(number, call):
    """KeyboardInterrupt at this line of the engine's that a call runs; False if it runs fewer."""
    left = number

    def trace(frame, event, arg):
        nonlocal left
        if not frame.f_code.co_filename.startswith(ENGINE):
            return None
        left -= event == "line"
        if left == 0:
            left = -1
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


class Failing(SimulatedRunner):
    """Its third round fails."""

    def execute_main_model(self, step, batch, previous):
        if step == 3:
            raise MemoryError("no memory left on the device")
        return super().execute_main_model(step, batch, previous)


def test_an_error_of_the_runner_is_raised_and_closes():
    llm = make(lambda: Failing(4, MODEL))
    with pytest.raises(MemoryError, match="on the device") as caught:
        answers(llm)
    assert any("LLM is closed" in note for note in caught.value.__notes__)
    with pytest.raises(RuntimeError, match="LLM is closed: MemoryError"):
        answers(llm)


def test_a_closed_model_says_so_at_once():
    llm = make()
    llm.close()
    llm.close()
    for call in (llm.generate, llm.chat, lambda prompts: llm.__enter__()):
        with pytest.raises(RuntimeError, match="LLM is closed"):
            call([[1, 2]])
