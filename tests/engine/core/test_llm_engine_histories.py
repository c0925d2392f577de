"""Random histories of requests that are cancelled, cached, evicted or preempted: each request gets
the tokens that it would get alone, exactly one final event, and gives back every block."""

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

from services.common.errors import FleetError
from services.engine.compute.simulated_runner import SimulatedModel
from services.engine.core.timing import RoundTimer

# Families of prompts that share prefixes of every length, block borders included.
_BASES = [[(7 * i + 11 * family) % 63 + 1 for i in range(48)] for family in range(3)]
prompts = st.builds(
    lambda family, length, tail: _BASES[family][:length] + tail,
    st.integers(0, 2),
    st.integers(0, 30),
    st.lists(st.integers(1, 63), min_size=1, max_size=3),
) | st.builds(
    lambda family, blocks: _BASES[family][: 4 * blocks], st.integers(0, 2), st.integers(1, 8)
)

params = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 24) | st.none()},
    optional={
        "temperature": st.sampled_from([0.0, 1.0]),
        "n": st.integers(1, 3),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.just((5, 9)),
        "cache_bypass": st.booleans(),
        "prompt_logprobs": st.booleans(),
    },
)
# With blocks of 4: all history, windows below, at and above a block, states with a snapshot after
# each block, each second and each third, and a state that is rebuilt without one.
_MODELS = [SimulatedModel(vocab_size=64, max_model_len=64, eos=0)] + [
    SimulatedModel(vocab_size=64, max_model_len=64, eos=0, **kind)
    for kind in (
        {"window": 1},
        {"window": 4},
        {"window": 7},
        {"state_boundary": 1},
        {"state_boundary": 8},
        {"state_boundary": 6},
        {"state_boundary": 2, "state_replay": 6},
    )
]
_EVENTS = ("StoredBlocks", "RemovedBlocks")
_SEEN: set[str] = set()


class FixedRate(RoundTimer):
    """Pretends to have measured so many positions a second."""

    def __init__(self, tokens_per_s):
        super().__init__(lambda: 0.0)
        self._rate = float(tokens_per_s)

    best_prefill_tokens_per_s = property(lambda self: self._rate, lambda self, _: None)


class Histories(RuleBasedStateMachine):
    make_driver = None

    @initialize(
        num_blocks=st.sampled_from([5, 9, 14, 40]),
        budget=st.sampled_from([3, 8, 32]),
        seqs=st.sampled_from([2, 5, 16]),
        policy=st.sampled_from(["fcfs", "priority", "priority", "shortest_prefill", "tenant_fair"]),
        prefix_cache=st.sampled_from([True, True, False]),
        measured=st.booleans(),
        model=st.sampled_from([_MODELS[0], *_MODELS]),
        state_slots=st.sampled_from([1, 2, 4, 12]),
    )
    def start(self, num_blocks, budget, seqs, policy, prefix_cache, measured, model, state_slots):
        self.now_s = 1000
        self.count = 0
        self.driver = self.make_driver(
            model,
            state_slots=state_slots,
            num_blocks=num_blocks,
            max_num_batched_tokens=budget,
            max_num_seqs=seqs,
            policy=policy,
            prefix_cache=prefix_cache,
            max_waiting=6,
            now_ns=lambda: self.now_s * 10**9,
        )
        if measured:  # a round takes a second here, so no prompt is computed faster than this
            self.driver.engine._timer = FixedRate(budget)

    def refusal(self, prompt, **fields):
        """Status with which the request is refused, or None."""
        key = f"r{self.count}"
        self.count += 1
        try:
            self.driver.add(key, prompt, **fields)
        except FleetError as error:
            _SEEN.add(error.code.name)
            _SEEN.add(error.reason)
            if error.code.name == "RESOURCE_EXHAUSTED":
                return error.code.name if error.retry_after_s > 0 else "no retry hint"
            return error.code.name
        return None

    @rule(
        prompt=prompts,
        own=params,
        priority=st.integers(-1, 2),
        tenant=st.sampled_from("ab"),
        patience=st.none() | st.integers(0, 30),
    )
    def arrive(self, prompt, own, priority, tenant, patience):
        deadline = None if patience is None else self.now_s + patience
        fits = len(prompt) <= self.driver.engine.memory.num_positions
        refusal = self.refusal(prompt, priority=priority, tenant=tenant, deadline=deadline, **own)
        late = [] if patience is None else ["DEADLINE_EXCEEDED"]
        assert refusal in ([None, "RESOURCE_EXHAUSTED", *late] if fits else ["INVALID_ARGUMENT"])

    @precondition(lambda self: self.driver.tokens)
    @rule(data=st.data())
    def resume(self, data):
        """Another engine's stream comes here: the same request after some tokens of its choices,
        of which some have ended there."""
        names = sorted(name for name, tokens in self.driver.tokens.items() if tokens)
        self.resume_one(data, names, has_ended=False)

    @precondition(lambda self: self.choices_ended_before_others())
    @rule(data=st.data())
    def resume_where_a_choice_has_ended(self, data):
        self.resume_one(data, self.choices_ended_before_others(), has_ended=True)

    def choices_ended_before_others(self):
        """Ended choices of requests with several: `resume` alone meets one too seldom."""
        several = {key for key, request in self.driver.requests.items() if request.params.n > 1}
        return sorted(name for name in self.driver.reasons if name[0] in several)

    def resume_one(self, data, names, has_ended):
        old, chosen = data.draw(st.sampled_from(names))
        request = self.driver.requests[old]
        if request.continued:
            return
        names = [(old, choice) for choice in range(request.params.n)]
        given = [self.driver.tokens.get(name, []) for name in names]
        ended = [name in self.driver.reasons and data.draw(st.booleans()) for name in names]
        ended[chosen] |= has_ended
        cuts = [
            len(tokens) if end else data.draw(st.integers(0, len(tokens)))
            for tokens, end in zip(given, ended, strict=True)
        ]
        if all(ended) or not any(cuts):
            return
        fields = ("max_tokens", "ignore_eos", "stop_token_ids", "temperature", "n")
        refused = self.refusal(
            request.prompt_token_ids,
            continued=[tokens[:cut] for tokens, cut in zip(given, cuts, strict=True)],
            finished=[choice for choice, end in enumerate(ended) if end],
            **{name: getattr(request.params, name) for name in fields},
        )
        if not refused:
            _SEEN.add("continued" if len(names) == 1 else "continued choices")
            _SEEN.update("ended elsewhere" for end in ended if end)

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.driver.step()
            self.now_s += 1

    @precondition(lambda self: self.driver.requests)
    @rule(data=st.data())
    def cancel(self, data):
        key = data.draw(st.sampled_from(sorted(self.driver.requests)))
        n = self.driver.requests[key].params.n
        self.driver.abort(key, data.draw(st.none() | st.integers(0, n - 1)))

    @invariant()
    def whole(self):
        if hasattr(self, "driver"):
            self.driver.engine.check_integrity()

    def teardown(self):
        if not hasattr(self, "driver"):
            return
        driver = self.driver
        driver.run()
        driver.check_all()
        _SEEN.update("preempted" for m in driver.marks if m.preempted)
        kind = "state" if driver.model.state else "window" if driver.model.window else "history"
        _SEEN.update(f"{kind} hit" for m in driver.marks if m.cached_tokens)
        for event in driver.engine.drain_cache_events():
            _SEEN.add(f"{type(event).__name__} {getattr(event, 'kind', '')}")
        _SEEN.update(driver.failures.values())
        _SEEN.update(driver.reasons.values())
        driver.engine.close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "examples", [400, pytest.param(1000, marks=[pytest.mark.verify, pytest.mark.timeout(900)])]
)
def test_random_histories_keep_every_promise(make_driver, examples):
    _SEEN.clear()
    Histories.make_driver = staticmethod(make_driver)
    happened = {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "QUEUE_FULL", "DEADLINE_UNREACHABLE"}
    happened |= {"continued", "continued choices", "ended elsewhere"}
    happened |= {"preempted", "history hit", "window hit", "state hit"}
    happened |= {f"{event} {kind}" for event in _EVENTS for kind in ("history", "state")}
    happened |= {"DEADLINE_EXCEEDED", "EOS", "STOP_TOKEN", "MAX_TOKENS", "CONTEXT_FULL"}
    for _ in range(5):  # what is rare may fail to come once
        run_state_machine_as_test(
            Histories,
            settings=settings(
                max_examples=examples,
                stateful_step_count=14,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
        if happened <= _SEEN:
            break
    assert happened <= _SEEN, f"never happened: {happened - _SEEN}"
