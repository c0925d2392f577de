"""Penalised answers beside a plain reference: alone, batched, in chunks, preempted, resumed.

The runner has logits of its own: a function of the whole history as the blocks lead to it. The real
sampler draws from them. The reference computes each token from the definitions of the penalties,
with Python numbers and the reference kernels.
"""

from collections import Counter

import numpy as np
import pytest
import torch

from kernels import dispatch
from kernels.reference.sample import sample
from services.engine.compute.sampling.noise import row_key
from services.engine.compute.sampling.sampler import Sampler
from services.engine.compute.sampling.sampling_inputs import build_sampling
from services.engine.compute.simulated_runner import SimulatedModel, SimulatedRunner, checksum_of
from services.engine.contract.runner import SamplerOutput

VOCABULARY = 24
MODEL = SimulatedModel(vocab_size=VOCABULARY, max_model_len=512, eos=VOCABULARY - 1)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
LENGTH = 40
PENALTIES = {
    "repetition": {"repetition_penalty": 1.6},
    "presence": {"presence_penalty": 1.2},
    "frequency": {"frequency_penalty": 0.4},
    "all": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3},
}
DRAWS = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.8, "seed": 11}}


def logits_after(checksum: int) -> list[float]:
    """Logits that lean to a few ids, so that an answer without penalties repeats itself."""
    drawn = np.random.default_rng(checksum).normal(size=VOCABULARY)
    lean = np.where(np.arange(VOCABULARY) < 8, 1.5, 0.0)
    return [float(np.float32(value)) for value in drawn + lean]


class LogitRunner(SimulatedRunner):
    """A runner with logits and the real sampler."""

    def __init__(self) -> None:
        super().__init__(4, MODEL)
        self._sampler = Sampler(dispatch.load("torch"), one_by_one=True)

    def execute_sample(self, step, hidden, rows):
        sums, prompt = hidden
        tokens = ()
        if sums:
            logits = torch.tensor([logits_after(value) for value in sums], dtype=torch.float32)
            tokens = self._sampler(logits, build_sampling(rows, torch.device("cpu"))).tokens
        return SamplerOutput(step=step, tokens=tokens, prompt_logprobs=prompt)


def reference(choice: int = 0, **params) -> list[int]:
    """The answer by definition, one token after another."""
    history = list(PROMPT)
    for _ in range(LENGTH):
        output = Counter(history[len(PROMPT) :])
        scores = logits_after(checksum_of(history))
        factor = params.get("repetition_penalty", 1.0)
        for token in set(history):
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
        for token, count in output.items():
            scores[token] -= params.get("presence_penalty", 0.0)
            scores[token] -= params.get("frequency_penalty", 0.0) * count
        if params["temperature"] == 0:
            history.append(scores.index(max(scores)))
            continue
        heated = torch.tensor([scores], dtype=torch.float32) / params["temperature"]
        key = row_key(params["seed"], choice, len(history))
        history.append(int(sample(heated, torch.tensor([key]))[0]))
    return history[len(PROMPT) :]


@pytest.fixture
def run_it(make_driver):
    """Runs the answer of interest; `others` run beside it."""

    def run(params, *, continued=(), others=0, **fields) -> list[int]:
        driver = make_driver(MODEL, runner=LogitRunner, **fields)
        whole = {"max_tokens": LENGTH, "ignore_eos": True}
        for index in range(others):
            driver.add(f"other{index}", PROMPT[index:], seed=index, temperature=1.0, **whole)
        driver.add("it", PROMPT, continued=[continued] if continued else (), **params, **whole)
        driver.run()
        preempted = {mark.request_key for mark in driver.marks if mark.preempted}
        assert ("it" in preempted) == ("num_blocks" in fields)
        return [*continued, *driver.tokens[("it", 0)]]

    return run


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("draw", DRAWS)
def test_a_penalised_answer_is_the_references_however_it_is_computed(run_it, penalty, draw):
    params = {**PENALTIES[penalty], **DRAWS[draw]}
    want = reference(**params)
    assert want != reference(**DRAWS[draw]), "the penalty changes the answer"
    assert run_it(params) == want
    assert run_it(params, others=3) == want
    assert run_it(params, max_num_batched_tokens=3, others=1) == want
    assert run_it(params, num_blocks=26, others=3) == want


@pytest.mark.parametrize("penalty", PENALTIES)
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("begun", [1, 17, LENGTH - 1])
def test_a_penalised_answer_is_resumed_as_it_was_begun(run_it, penalty, draw, begun):
    params = {**PENALTIES[penalty], **DRAWS[draw]}
    want = reference(**params)
    assert run_it(params, continued=want[:begun]) == want
    assert run_it(params, continued=want[:begun], others=2) == want
    assert run_it(params, continued=want[:begun], max_num_batched_tokens=5) == want


def test_each_choice_has_its_own_penalties_and_noise(make_driver):
    driver = make_driver(MODEL, runner=LogitRunner)
    params = {**PENALTIES["all"], **DRAWS["seeded"]}
    driver.add("it", PROMPT, n=3, max_tokens=LENGTH, ignore_eos=True, **params)
    driver.run()
    for choice in range(3):
        assert driver.tokens[("it", choice)] == reference(choice, **params)
