"""Engines over a simulated runner, a driver that records their output, and a sequential oracle."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from services.engine.compute.simulated_runner import (
    SimulatedModel,
    SimulatedRunner,
    next_token,
)
from services.engine.contract.config import EngineConfig
from services.engine.contract.messages import AddRequest, CoreRequest
from services.engine.contract.runner import SamplingRow
from services.engine.contract.sampling_params import SamplingParams
from services.engine.core.engine_factory import build_engine
from services.engine.core.llm_engine import LLMEngine
from services.engine.core.step_result import StepResult

MODEL = SimulatedModel(vocab_size=64, max_model_len=64, eos=0)


@dataclass
class Driver:
    """Steps an engine and keeps its whole output, per request and choice."""

    engine: LLMEngine
    model: SimulatedModel = MODEL
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[tuple[str, int], str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    prompt_logprobs: dict[str, list] = field(default_factory=dict)
    releases: Counter = field(default_factory=Counter)
    marks: list = field(default_factory=list)
    requests: dict[str, CoreRequest] = field(default_factory=dict)
    aborted: set = field(default_factory=set)

    def add(
        self,
        key: str,
        prompt,
        continued=(),
        finished=(),
        salt=b"",
        tenant="",
        priority=0,
        deadline=None,
        **params,
    ):
        params.setdefault("temperature", 0.0)
        params.setdefault("seed", 7)
        request = CoreRequest(
            prompt_token_ids=list(prompt),
            params=SamplingParams(**params),
            continued=tuple(tuple(c) for c in continued),
            finished_choices=tuple(finished),
            salt=salt,
            tenant=tenant,
            priority=priority,
        )
        message = AddRequest(key, request, deadline)
        self.engine.add_request(message)
        self.requests[key] = request

    def abort(self, key: str, choice: int | None = None) -> bool:
        done = self.engine.abort_request(key, choice)
        if done:
            choices = range(self.requests[key].params.n) if choice is None else [choice]
            self.aborted |= {(key, c) for c in choices if (key, c) not in self.reasons}
        return done

    def step(self) -> StepResult:
        result = self.engine.step()
        for output in result.outputs:
            name = (output.request_key, output.choice)
            assert name not in self.reasons, f"{name} goes on after its end"
            assert name not in self.aborted, f"{name} goes on after its abort"
            self.tokens[name] += output.token_ids
            if output.finish_reason:
                self.reasons[name] = output.finish_reason
            if output.num_cached_tokens:
                self.cached[output.request_key] = output.num_cached_tokens
            if output.prompt_logprobs:
                assert output.request_key not in self.prompt_logprobs
                self.prompt_logprobs[output.request_key] = output.prompt_logprobs
        for failure in result.failures:
            assert failure.request_key not in self.failures
            self.failures[failure.request_key] = failure.code
        self.marks += result.marks
        if any(mark.preempted for mark in result.marks):
            admitted = [mark.request_key for mark in result.marks if mark.verb == "admit"]
            assert not admitted, f"{admitted} admitted in a round that preempts"
        self.releases.update(m.request_key for m in result.marks if m.verb == "release")
        self.engine.check_integrity()
        return result

    def run(self, limit: int = 3000) -> "Driver":
        """Step to the end."""
        for _ in range(limit):
            if not self.engine.has_unfinished_requests():
                return self
            self.step()
        raise AssertionError(f"not finished after {limit} rounds")

    def expected(self, key: str, choice: int = 0) -> tuple[list[int], str]:
        """New tokens of a choice and its finish reason, one by one without any engine."""
        memory = self.engine.memory
        longest = min(memory.max_model_len, memory.num_positions + 1)
        return oracle(self.requests[key], choice, self.model, longest)

    def check(self, key: str) -> None:
        """Every choice that was not aborted has exactly the oracle's tokens and reason."""
        for choice in range(self.requests[key].params.n):
            name = (key, choice)
            if choice in self.requests[key].finished_choices:
                assert name not in self.tokens, f"{name} had ended at another engine"
                continue
            tokens, reason = self.expected(key, choice)
            if name in self.aborted or key in self.failures:
                assert self.tokens[name] == tokens[: len(self.tokens[name])], name
            else:
                assert (self.tokens[name], self.reasons.get(name)) == (tokens, reason), name

    def check_all(self) -> None:
        """After the end: right tokens, one final event each, no block held."""
        for key in self.requests:
            self.check(key)
            assert self.releases[key] == 1, f"{key}: {self.releases[key]} final events"
        assert self.engine.load().held_blocks == 0
        states = self.engine._blocks.states
        assert states is None or states.slots.num_held == 0, "a slot of state is held"
        assert self.engine.load().running_requests == self.engine.load().waiting_requests == 0


def oracle(request: CoreRequest, choice: int, model: SimulatedModel, limit: int):
    params = request.params
    continued = request.continued[choice] if choice < len(request.continued) else []
    history = [*request.prompt_token_ids, *continued]
    num_prompt = len(request.prompt_token_ids)
    ends = {*params.stop_token_ids} | (set() if params.ignore_eos else {model.eos})
    new: list[int] = []
    while True:
        num_output = len(history) - num_prompt
        if num_output and num_output >= params.min_tokens and history[-1] in ends:
            is_eos = history[-1] == model.eos and not params.ignore_eos
            return new, "EOS" if is_eos else "STOP_TOKEN"
        if params.max_tokens is not None and num_output >= params.max_tokens:
            return new, "MAX_TOKENS"
        if len(history) >= limit:
            return new, "CONTEXT_FULL"
        forbid = tuple(ends) if num_output < params.min_tokens else ()
        row = SamplingRow(params, params.seed, choice, len(history), forbid_token_ids=forbid)
        new.append(next_token(model.checksum(history), row, model.vocab_size))
        history.append(new[-1])


MakeDriver = Callable[..., Driver]


@pytest.fixture
def make_driver() -> Iterator[MakeDriver]:
    """Makes drivers; fields are those of EngineConfig. Engines end idle, with all blocks back."""
    drivers: list[Driver] = []

    def make(model: SimulatedModel = MODEL, runner=None, now_ns=None, **fields) -> Driver:
        config = EngineConfig(
            **{"num_blocks": 64, "block_size": 4, "max_num_batched_tokens": 32, **fields}
        )
        make_runner = runner or (lambda: SimulatedRunner(config.block_size, model))
        engine = build_engine(config, make_runner, now_ns=now_ns or time.time_ns)
        drivers.append(Driver(engine, model))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.engine.check_integrity()
        driver.engine.close()


@pytest.fixture
def driver(make_driver: MakeDriver) -> Driver:
    return make_driver()
