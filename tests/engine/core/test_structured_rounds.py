"""Constrained requests among rounds: held for their grammar, masked, ended, carried on."""

import json
import re
import threading
import time
from dataclasses import replace

import pytest

from services.engine.compute.simulated_runner import SimulatedModel, SimulatedRunner
from services.engine.contract.sampling_params import Constraint
from services.engine.core.constraints import Constraints
from services.engine.grammar.structured_output import SOMatcher, SOMatcherBuilder
from services.engine.grammar.wire import Setup

# The first constraint waits for a process that loads xgrammar.
pytestmark = pytest.mark.timeout(240)
EOS, EOS_2 = 258, 256
MODEL = SimulatedModel(vocab_size=320, max_model_len=256, eos=EOS)
WORD = Constraint("regex", "[a-f]{3,6}-[0-9]{2}")
BOMB = Constraint(
    "regex", "|".join(f"{chr(97 + i % 26)}{i}(x|y{{0,100}}){{0,40}}" for i in range(400))
)


class TwoEnds(SimulatedRunner):
    """A model with two end tokens."""

    def describe(self):
        return replace(super().describe(), eos_token_ids=(EOS_2, EOS))


class SharedBuilder(SOMatcherBuilder):
    """Outlives the engines of a module: its process takes seconds to start."""

    def close(self) -> None:
        """Not with the engine."""

    def really_close(self) -> None:
        super().close()

    @property
    def num_compiled(self) -> int:
        return self._compiler._number


@pytest.fixture(scope="module")
def builder():
    made = SharedBuilder(Setup("", MODEL.vocab_size, [EOS_2, EOS], 1 << 30), timeout_s=3)
    yield made
    made.really_close()


@pytest.fixture
def make(make_driver, builder):
    def make(**fields):
        driver = make_driver(MODEL, lambda: TwoEnds(4, MODEL), **fields)
        driver.engine._constraints = Constraints(lambda: builder)
        return driver

    return make


def settle(driver, until=None):
    """Step to the end, or until it is true; returns the failures by request."""
    failures = {}
    give_up = time.monotonic() + 120
    while driver.engine.has_unfinished_requests() and not (until and until()):
        assert time.monotonic() < give_up, "not finished in 120 s"
        result = driver.step()
        failures |= {failure.request_key: failure for failure in result.failures}
        if driver.engine.is_stuck(result):
            driver.engine.wait_for_grammar(0.05)
    return failures


def text(driver, key, choice=0):
    return bytes(t for t in driver.tokens[key, choice] if t < 256).decode()


def holds_nothing(driver):
    load = driver.engine.load()
    assert (load.held_blocks, load.running_requests, load.waiting_requests) == (0, 0, 0)


def test_each_choice_follows_its_grammar_to_the_end(make):
    driver = make()
    for seed in range(4):
        driver.add(f"r{seed}", [1, 2, 3], temperature=1.0, seed=seed, n=3, constraint=WORD)
    assert settle(driver) == {}
    texts = [text(driver, f"r{seed}", choice) for seed in range(4) for choice in range(3)]
    assert all(re.fullmatch(WORD.text, one) for one in texts)
    assert len(set(texts)) == 12
    assert set(driver.reasons.values()) == {"GRAMMAR_COMPLETE"}
    # The grammar's end is known with the last letter: no end token is drawn.
    assert all(len(tokens) == len(bytes(tokens)) for tokens in driver.tokens.values())
    holds_nothing(driver)


def test_a_schema_gives_json_also_greedily(make):
    driver = make()
    number = {"type": "integer", "minimum": 1, "maximum": 99}
    schema = {"type": "object", "properties": {"n": number}, "required": ["n"]}
    driver.add("a", [5], constraint=Constraint("json_schema", json.dumps(schema)))
    assert settle(driver) == {}
    assert 1 <= json.loads(text(driver, "a"))["n"] <= 99


def test_a_held_request_lets_others_pass_and_a_bomb_ends_alone(make):
    driver = make(max_num_seqs=2)
    driver.add("bomb", [1], constraint=BOMB)
    for number in range(6):
        driver.add(f"plain{number}", [1, number], max_tokens=4, ignore_eos=True)
    settle(driver, until=lambda: len(driver.reasons) == 6)
    assert driver.engine.load().waiting_requests == 1
    failures = settle(driver)
    assert failures["bomb"].code == "INVALID_ARGUMENT"
    assert failures["bomb"].reason == "CONSTRAINT_TOO_COSTLY"
    assert failures["bomb"].field == "constraint.regex"
    assert driver.releases["bomb"] == 1
    driver.add("again", [1], constraint=BOMB)
    began = time.monotonic()
    assert settle(driver)["again"].reason == "CONSTRAINT_TOO_COSTLY"
    assert time.monotonic() - began < 1  # remembered, not tried again
    holds_nothing(driver)


def test_an_abort_while_the_grammar_is_built_frees_everything(make, builder):
    driver = make()
    for key in ("gone", "kept"):
        driver.add(key, [1, 2], n=2, constraint=Constraint("regex", "(ab|cd){4}"))
    driver.step()
    assert driver.abort("kept", choice=1)
    assert driver.abort("gone")
    assert not driver.abort("gone")
    assert settle(driver) == {}
    assert ("gone", 0) not in driver.reasons
    assert driver.reasons == {("kept", 0): "GRAMMAR_COMPLETE"}
    assert dict(driver.releases) == {"gone": 1, "kept": 1}
    assert builder.num_pending == 0
    holds_nothing(driver)


def test_a_deadline_counts_while_the_grammar_is_built(make, builder):
    driver = make()
    driver.add("late", [1], constraint=Constraint("regex", "late"), deadline=time.time() - 1)
    failures = settle(driver)
    assert failures["late"].code == "DEADLINE_EXCEEDED"
    assert builder.num_pending == 0
    holds_nothing(driver)


def test_twenty_equal_constraints_are_compiled_once(make, builder):
    driver = make()
    before = builder.num_compiled
    shared = Constraint("regex", "x[0-9]{3}y")
    for number in range(20):
        driver.add(f"r{number}", [number], temperature=1.0, seed=number, constraint=shared)
    assert settle(driver) == {}
    assert builder.num_compiled == before + 1
    assert all(re.fullmatch(shared.text, text(driver, f"r{n}")) for n in range(20))


def test_a_grammar_that_does_not_compile_names_its_field(make):
    driver = make()
    driver.add("bad", [1], constraint=Constraint("ebnf", "root ::= never"))
    driver.add("good", [1], constraint=WORD)
    failures = settle(driver)
    assert list(failures) == ["bad"]
    assert failures["bad"].code == "INVALID_ARGUMENT"
    assert failures["bad"].field == "constraint.ebnf"
    assert re.fullmatch(WORD.text, text(driver, "good"))


def test_nothing_ends_inside_and_stop_tokens_never_cut(make):
    driver = make()
    # Letters a to f: the stop token is one of them, and cannot be drawn.
    driver.add("stop", [1], temperature=1.0, stop_token_ids=(ord("a"),), constraint=WORD)
    driver.add("ignore", [2], temperature=1.0, ignore_eos=True, constraint=WORD)
    driver.add("long", [3], temperature=1.0, min_tokens=20, constraint=WORD)
    assert settle(driver) == {}
    assert re.fullmatch("[b-f]{3,6}-[0-9]{2}", text(driver, "stop"))
    assert re.fullmatch(WORD.text, text(driver, "ignore"))
    assert re.fullmatch(WORD.text, text(driver, "long"))
    assert set(driver.reasons.values()) == {"GRAMMAR_COMPLETE"}


def test_a_text_that_may_go_on_ends_by_an_end_token_unless_that_is_not_wanted(make):
    driver = make()
    open_end = Constraint("regex", "[ab]*")
    for seed in range(8):
        driver.add(f"free{seed}", [1], temperature=1.0, seed=seed, constraint=open_end)
    driver.add("min", [1], temperature=1.0, min_tokens=9, constraint=open_end)
    driver.add("never", [1], temperature=1.0, ignore_eos=True, max_tokens=30, constraint=open_end)
    stops = {"ignore_eos": True, "stop_token_ids": (EOS_2,)}
    driver.add("own", [1], temperature=1.0, constraint=open_end, **stops)
    assert settle(driver) == {}
    assert {driver.reasons[f"free{seed}", 0] for seed in range(8)} == {"EOS"}
    assert len(driver.tokens["min", 0]) >= 9
    assert driver.reasons["never", 0] == "MAX_TOKENS"
    assert set(driver.tokens["never", 0]) == {ord("a"), ord("b")}
    assert driver.reasons["own", 0] == "STOP_TOKEN"
    assert driver.tokens["own", 0][-1] == EOS_2


def test_the_last_allowed_token_may_complete_the_grammar(make):
    driver = make()
    driver.add("fits", [1], max_tokens=3, constraint=Constraint("regex", "abc"))
    driver.add("cut", [1], max_tokens=2, constraint=Constraint("regex", "abc"))
    assert settle(driver) == {}
    assert driver.reasons == {("fits", 0): "GRAMMAR_COMPLETE", ("cut", 0): "MAX_TOKENS"}


def test_masks_that_leave_nothing_end_one_request(make):
    driver = make()
    driver.add("none", [1], allowed_token_ids=(ord("z"),), constraint=WORD)
    driver.add("fine", [1], constraint=WORD)
    failures = settle(driver)
    assert list(failures) == ["none"]
    assert failures["none"].code == "FAILED_PRECONDITION"
    assert failures["none"].reason == "CONSTRAINT_UNSATISFIABLE"
    assert re.fullmatch(WORD.text, text(driver, "fine"))
    holds_nothing(driver)


def test_a_grammar_that_becomes_slow_ends_one_request(make, monkeypatch):
    monkeypatch.setattr("services.engine.grammar.so_matcher.SLOW_TOKEN_S", 0.0003)
    driver = make()
    endless = Constraint("ebnf", 'root ::= root root | "a"')
    driver.add("slow", [1], ignore_eos=True, constraint=endless)
    failures = settle(driver)
    assert failures["slow"].code == "FAILED_PRECONDITION"
    assert failures["slow"].reason == "CONSTRAINT_TOO_COSTLY"


LONG = Constraint(
    "json_schema", '{"type":"array","items":{"enum":["ab","cde"]},"minItems":5,"maxItems":6}'
)
SAME = {"temperature": 1.0, "seed": 11, "max_tokens": 150, "constraint": LONG}


def test_preemption_chunks_and_cache_hits_change_no_token(make):
    alone = make()
    prompts = {f"r{n}": [n, *range(20)] for n in range(4)}
    for key, prompt in prompts.items():
        alone.add(key, prompt, **SAME)
    assert settle(alone) == {}
    crowded = make(num_blocks=44, max_num_batched_tokens=8)
    for _ in range(2):
        for key, prompt in prompts.items():
            crowded.add(f"{key}", prompt, **SAME)
        assert settle(crowded) == {}
        assert all(crowded.tokens[key, 0] == alone.tokens[key, 0] for key in prompts)
        assert any(mark.preempted for mark in crowded.marks)
        crowded.tokens.clear()
        crowded.reasons.clear()
    assert any(crowded.cached.values())


def test_a_stream_is_carried_on_at_every_token(make):
    whole = make()
    whole.add("a", [1, 2], **SAME)
    settle(whole)
    tokens = whole.tokens["a", 0]
    assert whole.reasons["a", 0] == "GRAMMAR_COMPLETE"
    other = make()
    for cut in range(1, len(tokens) + 1):
        other.add(f"a{cut}", [1, 2], continued=[tokens[:cut]], **SAME)
    assert settle(other) == {}
    for cut in range(1, len(tokens) + 1):
        assert other.tokens[f"a{cut}", 0] == tokens[cut:]
        assert other.reasons[f"a{cut}", 0] == "GRAMMAR_COMPLETE"
    holds_nothing(other)


def test_tokens_that_never_fitted_cannot_be_carried_on(make):
    driver = make()
    driver.add("a", [1], continued=[[ord("z")]], constraint=WORD)
    assert settle(driver)["a"].reason == "CONSTRAINT_UNSATISFIABLE"
    holds_nothing(driver)


def test_closing_with_a_held_request_ends_the_compiler(make_driver):
    driver = make_driver(MODEL, simulate="yes")
    driver.add("bomb", [1], constraint=BOMB)
    driver.step()
    builder = driver.engine._constraints._builder
    driver.engine.close()
    assert not builder._thread.is_alive()
    assert builder._compiler._process is None
    driver.abort("bomb")


class WaitsForMasks(TwoEnds):
    """Ends the forward of a round only when the mask for its draw is filled."""

    def __init__(self, *args):
        super().__init__(*args)
        self.filled = threading.Semaphore(0)
        self.steps: list[int] = []

    def execute_main_model(self, step, batch, drawn):
        assert self.filled.acquire(timeout=60), f"the mask of round {step} waits for its forward"
        self.steps.append(step)
        return super().execute_main_model(step, batch, drawn)


def test_the_mask_of_a_draw_is_filled_while_its_forward_runs(make_driver, builder, monkeypatch):
    runner = WaitsForMasks(4, MODEL)
    driver = make_driver(MODEL, lambda: runner)
    driver.engine._constraints = Constraints(lambda: builder)
    update = SOMatcher._update_mask

    def filled(matcher):
        update(matcher)
        runner.filled.release()

    monkeypatch.setattr(SOMatcher, "_update_mask", filled)
    returned: list[tuple[int, int]] = []
    driver.add("a", [1, 2], constraint=Constraint("regex", "abcdef"))
    give_up = time.monotonic() + 120
    while driver.engine.has_unfinished_requests():
        assert time.monotonic() < give_up
        result = driver.step()
        returned += [(result.step, len(runner.steps)) for _ in result.outputs]
        driver.engine.wait_for_grammar(0.05)
    assert text(driver, "a") == "abcdef"
    # Token n is returned by the step after its own; the round that is launched meanwhile is n+1.
    assert [step for step, _ in returned] == [1, 2, 3, 4, 5, 6]
    assert runner.steps[:6] == [1, 2, 3, 4, 5, 6]


def test_a_cut_choice_of_several_is_carried_on_and_an_ended_one_is_not(make):
    whole = make()
    whole.add("a", [1, 2], n=3, **SAME)
    assert settle(whole) == {}
    tokens = [whole.tokens["a", choice] for choice in range(3)]
    other = make()
    other.add("a", [1, 2], n=3, continued=[tokens[0][:4], tokens[1], []], finished=[1], **SAME)
    assert settle(other) == {}
    assert other.tokens["a", 0] == tokens[0][4:]
    assert ("a", 1) not in other.tokens
    assert other.tokens["a", 2] == tokens[2]
    assert set(other.reasons.values()) == {"GRAMMAR_COMPLETE"}
    holds_nothing(other)


def test_no_end_or_stop_id_is_drawn_inside_however_it_is_pushed(make):
    driver = make()
    name = {"type": "string", "minLength": 1, "maxLength": 20}
    schema = {
        "type": "object",
        "properties": {"name": name, "bio": {**name, "maxLength": 40}},
        "required": ["name", "bio"],
    }
    person = Constraint("json_schema", json.dumps(schema))
    pushed = {"constraint": person, "temperature": 1.0}
    stop = ord("z")
    driver.add("ends", [1], logit_bias=((EOS_2, 100.0), (EOS, 100.0)), **pushed)
    driver.add("stop", [2], logit_bias=((stop, 100.0),), stop_token_ids=(stop,), **pushed)
    driver.add("ignore", [3], logit_bias=((EOS, 100.0),), ignore_eos=True, **pushed)
    assert settle(driver) == {}
    assert set(driver.reasons.values()) <= {"GRAMMAR_COMPLETE", "EOS"}
    for key in ("ends", "stop", "ignore"):
        answer = json.loads(text(driver, key))
        assert 1 <= len(answer["name"]) <= 20
        assert 1 <= len(answer["bio"]) <= 40
    assert stop not in driver.tokens["stop", 0]
