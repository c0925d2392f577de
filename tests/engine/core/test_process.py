"""The core's loop in this process: what happens when the device fails in the middle of a round."""

import queue
import socket
import threading
from dataclasses import replace

import pytest

from services.engine.compute.simulated_runner import SimulatedModel, SimulatedRunner
from services.engine.contract.config import EngineConfig
from services.engine.contract.core_link import CoreEnd, LinkClosedError
from services.engine.contract.messages import (
    AddRequest,
    CoreReady,
    CoreRequest,
    RoundReport,
    Shutdown,
)
from services.engine.contract.sampling_params import SamplingParams
from services.engine.core.process import run_core

CONFIG = EngineConfig(num_blocks=64, block_size=4)


class BrokenRunner(SimulatedRunner):
    """Its third forward fails."""

    def execute_main_model(self, step, batch, previous):
        if step == 3:
            raise RuntimeError("the device is gone")
        return super().execute_main_model(step, batch, previous)


class Harness:
    """Runs a core on a thread; speaks with it through another end of the same kind."""

    def __init__(self, runner, config=CONFIG):
        ours, theirs = socket.socketpair()
        self.core, self.front = CoreEnd(theirs), CoreEnd(ours)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(runner, config), daemon=True)
        self._thread.start()

    def _run(self, runner, config):
        try:
            run_core(self.core, config, runner)
        except (RuntimeError, LinkClosedError) as error:
            self.error = error

    def add(self, key: str) -> None:
        params = SamplingParams(temperature=0.0, seed=1, max_tokens=9, ignore_eos=True)
        message = AddRequest(key, CoreRequest([1, 2, 3], params))
        self.front.send([message])

    def wait(self) -> BaseException | None:
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.error


@pytest.fixture
def harness():
    made = []

    def make(runner=None, config=CONFIG):
        made.append(Harness(runner or (lambda: SimulatedRunner(4)), config))
        return made[-1]

    yield make
    for harness in made:
        harness.front.close()
        harness.wait()
        harness.core.close()


def test_a_device_that_fails_ends_the_core_with_its_error(harness):
    core = harness(lambda: BrokenRunner(4))
    core.add("a")
    error = core.wait()
    assert isinstance(error, RuntimeError)
    assert "the device is gone" in str(error)


def test_a_shutdown_ends_the_loop_in_the_middle_of_work(harness):
    core = harness()
    core.add("a")
    core.front.send([Shutdown()])
    assert core.wait() is None


def test_a_front_that_leaves_ends_the_loop(harness):
    core = harness()
    core.add("a")
    core.front.close()
    assert isinstance(core.wait(), LinkClosedError)


@pytest.mark.parametrize(
    ("scarce", "runs"),
    [({"state_slots": 3}, 3), ({"max_num_batched_tokens": 2}, 2), ({"max_num_seqs": 2}, 2)],
)
def test_a_core_says_how_many_sequences_can_run(harness, caplog, monkeypatch, scarce, runs):
    sent = queue.Queue()
    monkeypatch.setattr(CoreEnd, "send", lambda self, messages: [sent.put(m) for m in messages])
    model = SimulatedModel.parse("state_boundary=4")
    config = replace(CONFIG, **{"max_num_seqs": 5, **scarce})
    harness(lambda: SimulatedRunner(4, model), config)
    ready = sent.get(timeout=30)
    assert isinstance(ready, CoreReady)
    assert ready.max_num_seqs == runs
    warned = f"max_num_seqs: only {runs} of 5 sequences can run at once" in caplog.text
    assert warned is (config.max_num_seqs == 5)


@pytest.mark.parametrize(("boundary", "cache", "warned"), [(24, 1, 1), (24, 0, 0), (12, 1, 0)])
def test_a_boundary_that_no_prompt_reaches_is_warned_of(
    harness, caplog, monkeypatch, boundary, cache, warned
):
    sent = queue.Queue()
    monkeypatch.setattr(CoreEnd, "send", lambda self, messages: [sent.put(m) for m in messages])
    model = SimulatedModel(max_model_len=24, state_boundary=boundary)
    harness(lambda: SimulatedRunner(4, model), replace(CONFIG, prefix_cache=bool(cache)))
    sent.get(timeout=30)
    assert ("block_size: no prefix can be reused" in caplog.text) is bool(warned)


def test_an_idle_core_reports_the_expert_loads_of_its_last_rounds(harness, monkeypatch):
    counted, original = threading.Event(), CoreEnd.send

    def send(self, messages):
        original(self, messages)
        reports = [message for message in messages if isinstance(message, RoundReport)]
        if any(any(map(any, report.expert_loads or ())) for report in reports):
            counted.set()

    monkeypatch.setattr(CoreEnd, "send", send)
    model = SimulatedModel.parse("experts=3,moe_layers=2,slots=4,ranks=1")
    core = harness(lambda: SimulatedRunner(4, model))
    core.add("a")
    assert counted.wait(10)
