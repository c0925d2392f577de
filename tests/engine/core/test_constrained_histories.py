"""Random histories of constrained requests: requests are held, aborted, preempted or resumed with
several choices, each choice gets the tokens that it would get alone, and nothing is left behind."""

import json
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from services.engine.compute.simulated_runner import SimulatedModel, SimulatedRunner
from services.engine.contract.messages import AddRequest, CoreRequest
from services.engine.contract.sampling_params import Constraint, SamplingParams
from services.engine.core.constraints import Constraints
from services.engine.grammar.structured_output import SOMatcherBuilder
from services.engine.grammar.wire import Setup

EOS, EOS_2 = 258, 256
MODEL = SimulatedModel(vocab_size=320, max_model_len=96, eos=EOS)
LIST = {"type": "array", "items": {"enum": ["ab", "c"]}, "minItems": 1, "maxItems": 3}
PAIR = {"type": "string", "pattern": "^[ab]+$", "minLength": 2, "maxLength": 6}
"""Enforced by llguidance; the others by xgrammar."""
NEVER = Constraint("ebnf", "root ::= never")
KINDS = {
    "word": Constraint("regex", "[a-f]{3,6}-[0-9]{2}"),
    "open": Constraint("regex", "[ab]*"),
    "choice": Constraint("choice", "", ("yes", "no", "né")),
    "list": Constraint("json_schema", json.dumps(LIST)),
    "strict": Constraint("json_schema", json.dumps(PAIR)),
    "never": NEVER,
    "plain": None,
}
params = st.fixed_dictionaries(
    {
        "constraint": st.sampled_from(sorted(KINDS)).map(KINDS.__getitem__),
        "max_tokens": st.integers(1, 24) | st.just(30),
        "n": st.integers(1, 3),
        "seed": st.integers(0, 3),
        "temperature": st.sampled_from([0.0, 1.0]),
    },
    optional={
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.just((97,)),
        "allowed_token_ids": st.just((97, 98, 99, 122)),
    },
)
prompts = st.builds(
    lambda start, length: [start + i for i in range(length)], st.integers(1, 3), st.integers(1, 30)
)
_SEEN: set[str] = set()


class TwoEnds(SimulatedRunner):
    """A model with two end tokens."""

    def describe(self):
        return replace(super().describe(), eos_token_ids=(EOS_2, EOS))


class LateBuilder(SOMatcherBuilder):
    """Outlives all engines; what it has built comes some polls later, as a compilation would."""

    polls = 0

    def pump(self):
        self._late = [*getattr(self, "_late", []), *super().pump()]
        self.polls += 1
        if self.polls % 4:
            return []
        given, self._late = self._late, []
        return given

    def cancel(self, request_key):
        super().cancel(request_key)
        self._late = [b for b in getattr(self, "_late", []) if b.request_key != request_key]

    def close(self):
        """Not with an engine."""

    def really_close(self):
        super().close()


class Histories(RuleBasedStateMachine):
    make = None
    alone = None

    @initialize(num_blocks=st.sampled_from([16, 22, 60]), budget=st.sampled_from([5, 32]))
    def start(self, num_blocks, budget):
        self.count = 0
        self.driver = self.make(num_blocks=num_blocks, max_num_batched_tokens=budget)

    def send(self, prompt, given, continued=(), finished=()):
        key = f"r{self.count}"
        self.count += 1
        request = CoreRequest(
            prompt_token_ids=list(prompt),
            params=SamplingParams(**given),
            continued=tuple(tuple(tokens) for tokens in continued),
            finished_choices=tuple(finished),
        )
        self.driver.engine.add_request(AddRequest(key, request))
        self.driver.requests[key] = request

    @rule(prompt=prompts, given=params)
    def arrive(self, prompt, given):
        self.send(prompt, given)

    @rule(constraint=st.sampled_from(sorted(KINDS)).map(KINDS.__getitem__))
    def crowd(self, constraint):
        """Two that start together and outgrow a small memory; beside them one with a constraint."""
        long = {"max_tokens": 24, "n": 1, "seed": 1, "temperature": 0.0, "ignore_eos": True}
        for start in (1, 2):
            self.send(range(start, start + 20), {**long, "constraint": None})
        self.send(range(3, 8), {**long, "constraint": constraint, "ignore_eos": False})

    @precondition(lambda self: self.driver.tokens)
    @rule(data=st.data())
    def resume(self, data):
        """Another engine's request comes here, each choice after some of its tokens."""
        self.move(data.draw(st.sampled_from(sorted({key for key, _ in self.driver.tokens}))), data)

    @rule(
        prompt=prompts,
        constraint=st.sampled_from([KINDS["open"], KINDS["strict"], None]),
        data=st.data(),
    )
    def arrive_and_move(self, prompt, constraint, data):
        """Several choices are resumed while some run: by `resume` alone that is rare."""
        given = {"constraint": constraint, "max_tokens": 20, "n": 2, "seed": 1, "temperature": 1.0}
        self.send(prompt, given)
        key = f"r{self.count - 1}"
        self.step(data.draw(st.integers(8, 24)))
        if any(name == key for name, _ in self.driver.tokens):
            self.move(key, data)

    def move(self, old, data):
        request, driver = self.driver.requests[old], self.driver
        if request.continued or old in driver.failures:
            return
        continued, finished = [], []
        for choice in range(request.params.n):
            tokens = driver.tokens.get((old, choice), [])
            cut = data.draw(st.integers(0, len(tokens)))
            continued.append(tokens[:cut])
            ended = driver.reasons.get((old, choice))
            if ended and cut == len(tokens):
                finished.append(choice)
        if len(finished) == request.params.n or not any(continued):
            return
        if request.params.n > 1:
            _SEEN.add("continued")
        given = {name: getattr(request.params, name) for name in request.params.__slots__}
        self.send(request.prompt_token_ids, given, continued, finished)

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.driver.step()

    @precondition(lambda self: self.driver.requests)
    @rule(data=st.data())
    def cancel(self, data):
        key = data.draw(st.sampled_from(sorted(self.driver.requests)))
        n = self.driver.requests[key].params.n
        held = self.driver.engine.num_held
        self.driver.abort(key, data.draw(st.none() | st.integers(0, n - 1)))
        _SEEN.update({"aborted while held"} if held > self.driver.engine.num_held else ())

    @invariant()
    def whole(self):
        if hasattr(self, "driver"):
            self.driver.engine.check_integrity()

    def teardown(self):
        if not hasattr(self, "driver"):
            return
        driver = self.driver
        driver.run()
        for key, request in driver.requests.items():
            self.check(key, request)
            assert driver.releases[key] == 1
        load = driver.engine.load()
        assert (load.held_blocks, load.running_requests, load.waiting_requests) == (0, 0, 0)
        assert driver.engine.num_held == 0
        _SEEN.update("preempted" for mark in driver.marks if mark.preempted)
        _SEEN.update(driver.reasons.values())
        _SEEN.update(driver.failures.values())
        driver.engine.close()

    def check(self, key, request):
        driver, params = self.driver, request.params
        tokens, reasons, failure = self.of_alone(tuple(request.prompt_token_ids), params)
        for choice in range(params.n):
            name = (key, choice)
            if choice in request.finished_choices:
                assert name not in driver.tokens
                continue
            known = len(request.continued[choice]) if request.continued else 0
            expected = tokens[choice][known:]
            output = driver.tokens[name]
            if failure:  # of one choice; how far the others are by then is a matter of rounds
                assert driver.failures.get(key, failure) == failure
                assert all(a == b for a, b in zip(output, expected, strict=False))
            elif name in driver.aborted:
                assert output == expected[: len(output)]
            else:
                assert (output, driver.reasons[name]) == (expected, reasons[choice])

    def of_alone(self, prompt, params):
        """Tokens and reasons by choice of a request on an engine of its own, and its failure."""
        if (prompt, params) not in self.alone:
            driver = self.make(num_blocks=400, max_num_batched_tokens=200)
            request = CoreRequest(prompt_token_ids=list(prompt), params=params)
            driver.engine.add_request(AddRequest("a", request))
            driver.requests["a"] = request
            driver.run()
            tokens = [driver.tokens["a", choice] for choice in range(params.n)]
            reasons = [driver.reasons.get(("a", choice), "") for choice in range(params.n)]
            self.alone[prompt, params] = tokens, reasons, driver.failures.get("a")
            driver.engine.close()
        return self.alone[prompt, params]


@pytest.fixture
def make(make_driver):
    setup = Setup("", MODEL.vocab_size, [EOS_2, EOS], 1 << 30)
    builder = LateBuilder(setup, timeout_s=60)

    def make(**fields):
        driver = make_driver(MODEL, lambda: TwoEnds(4, MODEL), max_num_seqs=6, **fields)
        driver.engine._constraints = Constraints(lambda: builder)
        return driver

    for name, constraint in KINDS.items():
        if constraint is not None:
            builder.submit(name, constraint)
    built: set[str] = set()
    while len(built) < len(KINDS) - 1:
        builder.wait(1)
        built |= {one.request_key for one in builder.pump()}
    yield make
    builder.really_close()


@pytest.mark.timeout(400)
def test_random_histories_of_constrained_requests(make):
    _SEEN.clear()
    Histories.make, Histories.alone = staticmethod(make), {}
    happened = {"preempted", "aborted while held", "continued"}
    happened |= {"GRAMMAR_COMPLETE", "MAX_TOKENS", "EOS", "INVALID_ARGUMENT", "FAILED_PRECONDITION"}
    for _ in range(3):  # what is rare may fail to come once
        run_state_machine_as_test(
            Histories,
            settings=settings(
                max_examples=60,
                stateful_step_count=14,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
        if happened <= _SEEN:
            break
    assert happened <= _SEEN, f"never happened: {happened - _SEEN}"
