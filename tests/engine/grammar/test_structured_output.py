import itertools
import json
import re
import time
import types
from pathlib import Path

import pytest

from services.common.errors import InvalidArgumentError
from services.engine.contract.sampling_params import Constraint
from services.engine.grammar.constraint_check import check_constraint
from services.engine.grammar.schema_plan import plan_schema
from services.engine.grammar.schema_refused import SchemaRefusedError
from services.engine.grammar.structured_output import (
    INVALID,
    TOO_COSTLY,
    UNAVAILABLE,
    SOMatcherBuilder,
    _digest,
)
from services.engine.grammar.wire import Setup

END = 258
CASES = json.loads((Path(__file__).parents[2] / "data" / "schemas.json").read_text())
MUST_COMPILE = ("enforce",)


# A process that loads xgrammar takes seconds to start, many on a crowded machine.
pytestmark = pytest.mark.timeout(240)
BYTES = Setup("", 300, [END], 2 << 30)


def generated(generator: dict) -> dict:
    kind = generator["kind"]
    if kind == "nest_oneof":
        schema: dict = {"type": "string"}
        for level in range(generator["depth"]):
            schema = {
                "oneOf": [
                    {
                        "type": "object",
                        "properties": {f"k{level}{i}": schema},
                        "required": [f"k{level}{i}"],
                    }
                    for i in range(generator["width"])
                ]
            }
        return schema
    if kind == "enum":
        return {"enum": [f"{generator['prefix']}{i}" for i in range(generator["n"])]}
    if kind == "optional":
        members = {f"p{i}": {"type": "integer"} for i in range(generator["n"])}
        return {"type": "object", "properties": members, "additionalProperties": False}
    if kind == "alternation":
        return {"type": "string", "pattern": "|".join(f"w{i}x" for i in range(generator["n"]))}
    defs = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(generator["n"])}
    defs[f"d{generator['n']}"] = {"type": "string"}
    return {"$ref": "#/$defs/d0", "$defs": defs}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_public_cases_are_enforced_or_refused(case, wait_for, allows):
    schema = case["schema"] if "schema" in case else generated(case["generator"])
    text = json.dumps(schema)
    try:
        plan_schema(text)
    except SchemaRefusedError:
        assert case["policy"] not in MUST_COMPILE
        return
    built = wait_for(Constraint("json_schema", text), case["id"])
    if built.problem is not None:
        assert case["policy"] not in MUST_COMPILE
        return
    for value in case.get("valid", []):
        if case["id"] in CLOSED and value.keys() - schema["properties"].keys():
            continue
        assert allows(built, json.dumps(value, ensure_ascii=False)), value
    for value in case.get("invalid", []):
        assert not allows(built, json.dumps(value, ensure_ascii=False)), value


# `additionalProperties: true` is the same as none: undeclared names are never produced.
CLOSED = {"sib-addl-true"}


@pytest.mark.parametrize(
    "pattern", ["a(cb+)?", "(c[ab]*)?a", "a(b+c)?", "a(?:cb{1,2})?", r"[)?]a\)?(?:\.b+)?"]
)
def test_an_optional_group_with_a_repeat_is_read_as_written(pattern, wait_for, allows):
    schema = {"type": "string", "pattern": f"^{pattern}$"}
    built = wait_for(Constraint("json_schema", json.dumps(schema)))
    assert built.grammar.backend == "xgrammar"
    for size in range(4):
        for letters in itertools.product("abc).", repeat=size):
            text = "".join(letters)
            fits = re.fullmatch(pattern, text) is not None
            assert allows(built, json.dumps(text)) is fits, text


def test_regex_and_choice_narrow_each_draw(wait_for, allows, allowed_ids):
    built = wait_for(Constraint("regex", "[ab]{2}c"))
    matcher = built.grammar.matcher()
    assert allowed_ids(matcher) == {ord("a"), ord("b")}
    assert matcher.accept(ord("a"))
    assert matcher.accept(ord("b"))
    assert allowed_ids(matcher) == {ord("c")}
    assert not matcher.accept(ord("a"))
    assert matcher.accept(ord("c"))
    assert allowed_ids(matcher) == {END}
    assert matcher.must_end
    assert matcher.accept(END)
    assert allowed_ids(matcher) == set()
    assert not matcher.accept(END)
    choice = wait_for(Constraint("choice", "", ('say "hi"', "né")), "c")
    assert allows(choice, 'say "hi"')
    assert allows(choice, "né")
    assert not allows(choice, "n")


def test_json_object_is_an_object(wait_for, allows):
    built = wait_for(Constraint("json_object", ""))
    assert allows(built, '{"a": [1, {"b": null}]}')
    assert not allows(built, "[1]")


def test_white_space_is_capped(wait_for, allows):
    built = wait_for(Constraint("json_schema", '{"type":"array","items":{"type":"null"}}'))
    assert allows(built, "[\n  null\n]")
    assert not allows(built, "[" + " " * 100 + "null]")


def test_replay_gives_the_same_state_as_single_tokens(wait_for, allowed_ids):
    built = wait_for(Constraint("regex", "abcd"))
    matcher = built.grammar.matcher()
    assert matcher.accept(ord("a"))
    assert matcher.accept(ord("b"))
    again = built.grammar.matcher()
    assert again.replay([ord("a"), ord("b")])
    assert allowed_ids(again) == allowed_ids(matcher) == {ord("c")}
    assert not built.grammar.matcher().replay([ord("x")])


def test_equal_constraints_share_one_compilation_and_a_cancelled_one_is_forgotten(builder):
    constraint = Constraint("regex", "shared[0-9]+")
    for key in ("a", "b", "gone"):
        builder.submit(key, constraint)
    builder.cancel("gone")
    keys: list[str] = []
    give_up = time.monotonic() + 120
    while len(keys) < 2 and time.monotonic() < give_up:
        keys += [built.request_key for built in builder.pump()]
        time.sleep(0.005)
    assert sorted(keys) == ["a", "b"]
    assert builder.num_pending == 0


def test_a_compilation_that_takes_too_long_is_killed_and_the_next_one_works(wait_for):
    hurried = SOMatcherBuilder(BYTES, timeout_s=0.05)
    try:
        bomb = "|".join(f"{chr(97 + i % 26)}{i}(x|y{{0,100}}){{0,40}}" for i in range(400))
        slow = wait_for(Constraint("regex", bomb), builder=hurried)
        assert "takes longer than" in (slow.problem or "")
        assert slow.reason == TOO_COSTLY
        quick = wait_for(Constraint("regex", "ab"), "second", hurried)
        assert quick.problem is None
    finally:
        hurried.close()


def test_a_text_that_may_go_on_or_end_is_not_spent(wait_for, allowed_ids):
    matcher = wait_for(Constraint("regex", "[ab]+")).grammar.matcher()
    assert not matcher.must_end
    assert matcher.accept(ord("a"))
    assert allowed_ids(matcher) == {ord("a"), ord("b"), END}
    assert not matcher.must_end


def test_a_grammar_whose_tokens_take_ever_longer_is_noticed(monkeypatch, wait_for):
    monkeypatch.setattr("services.engine.grammar.so_matcher.SLOW_TOKEN_S", 0.002)
    matcher = wait_for(Constraint("ebnf", 'root ::= root root | "a"')).grammar.matcher()
    plain = wait_for(Constraint("regex", "a+")).grammar.matcher()
    while not matcher.slow:
        assert matcher.accept(ord("a"))
        assert plain.accept(ord("a"))
    assert not plain.slow


def test_one_late_token_alone_ends_no_request(monkeypatch, wait_for):
    """Python may collect its garbage within it."""
    matcher = wait_for(Constraint("regex", "a+")).grammar.matcher()
    seconds = iter([0.0, 0.2, 1.0, 1.0, 2.0, 2.2, 3.0, 3.2])
    clock = types.SimpleNamespace(thread_time=lambda: next(seconds))
    monkeypatch.setattr("services.engine.grammar.so_matcher.time", clock)
    slow = []
    for _ in range(4):
        assert matcher.accept(ord("a"))
        slow.append(matcher.slow)
    assert slow == [False, False, False, True]


def test_a_bad_grammar_is_reported_by_the_compiler(wait_for):
    built = wait_for(Constraint("ebnf", "root ::= nobody"))
    assert built.grammar is None
    assert built.reason == INVALID
    assert built.problem.startswith("EBNF parser error at line 1, column 10")
    cut = wait_for(Constraint("ebnf", 'root ::= "a" ('))
    assert cut.problem.endswith("column 15: Expect element, but got the end of the line")
    tag = wait_for(Constraint("structural_tag", '{"type":"structural_tag"}'))
    assert tag.problem.startswith("Invalid structural tag error: Structural tag must have a format")


def test_a_compiler_that_was_killed_gets_a_successor(wait_for):
    builder = SOMatcherBuilder(BYTES)
    try:
        assert wait_for(Constraint("regex", "a"), builder=builder).problem is None
        builder._compiler._process.kill()
        assert wait_for(Constraint("regex", "b"), builder=builder).problem is None
    finally:
        builder.close()


def test_what_cannot_start_is_unavailable_and_not_remembered(wait_for, tmp_path):
    builder = SOMatcherBuilder(Setup(str(tmp_path / "model.gguf"), 300, [END], 1 << 30))
    try:
        for _ in range(2):
            built = wait_for(Constraint("regex", "a"), builder=builder)
            assert built.reason == UNAVAILABLE
            assert not builder._grammars
    finally:
        builder.close()


def test_a_request_that_left_before_its_turn_is_not_compiled(builder, wait_for):
    slow = Constraint("regex", "|".join(f"{i}(x{{0,90}}|y){{0,20}}" for i in range(90)))
    builder.submit("first", slow)
    for key, pattern in (("left", "b"), ("back", "c")):
        builder.submit(key, Constraint("regex", pattern))
        builder.cancel(key)
    # Its job may be left out by now, or not yet begun: it is compiled in either case.
    assert wait_for(Constraint("regex", "c"), "back").problem is None
    assert _digest(Constraint("regex", "b")) not in builder._grammars
    assert builder.num_pending == 0


def test_the_cache_of_grammars_is_bounded_by_count_and_bytes(wait_for, monkeypatch):
    small = SOMatcherBuilder(BYTES, cached=3)
    try:
        for number in range(5):
            assert wait_for(Constraint("regex", f"a{number}"), builder=small).problem is None
        kept = [
            _digest(Constraint("regex", f"a{number}")) in small._grammars for number in range(5)
        ]
        assert kept == [False, False, True, True, True]
        size = next(iter(small._grammars.values())).num_bytes
        monkeypatch.setattr("services.engine.grammar.structured_output.CACHED_BYTES", 2 * size)
        assert wait_for(Constraint("regex", "b"), builder=small).problem is None
        assert sum(built.num_bytes for built in small._grammars.values()) <= 2 * size
        assert small._cached_bytes == sum(b.num_bytes for b in small._grammars.values())
    finally:
        small.close()


def test_the_process_of_a_compilation_that_took_too_long_is_gone(wait_for):
    hurried = SOMatcherBuilder(BYTES, timeout_s=0.5)
    try:
        hurried._compiler.prepare()
        process = hurried._compiler._process
        bomb = "|".join(f"{chr(97 + i % 26)}{i}(x|y{{0,100}}){{0,40}}" for i in range(400))
        assert wait_for(Constraint("regex", bomb), builder=hurried).reason == TOO_COSTLY
        assert process.poll() is not None
        assert hurried._compiler._process is None
    finally:
        hurried.close()


def test_a_builder_closes_in_the_middle_of_a_compilation():
    builder = SOMatcherBuilder(BYTES, timeout_s=60)
    bomb = "|".join(f"{chr(97 + i % 26)}{i}(x|y{{0,100}}){{0,40}}" for i in range(400))
    builder.submit("bomb", Constraint("regex", bomb))
    wait_until_running(builder)
    process = builder._compiler._process
    builder.close()
    assert process.poll() is not None
    assert not builder._thread.is_alive()
    builder.close()


def wait_until_running(builder: SOMatcherBuilder) -> None:
    give_up = time.monotonic() + 120
    while not builder._compiler._number:
        assert time.monotonic() < give_up
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("constraint", "field"),
    [
        (Constraint("json_schema", '{"not":{"multipleOf":2}}'), "constraint.json_schema"),
        (Constraint("regex", "("), "constraint.regex"),
        (Constraint("choice", "", ()), "constraint.choice"),
        (Constraint("choice", "", ("a", "")), "constraint.choice"),
        (Constraint("ebnf", "x" * 70_000), "constraint.ebnf"),
        (Constraint("ebnf", ""), "constraint.ebnf"),
        (Constraint("structural_tag", "{"), "constraint.structural_tag"),
        (
            Constraint(
                "structural_tag",
                '{"format":{"type":"or","elements":[{"type":"json_schema","json_schema":'
                '{"type":"integer","multipleOf":2}}]}}',
            ),
            "constraint.structural_tag",
        ),
        (
            Constraint("structural_tag", '{"format":{"type":"regex","pattern":"(?=a)b"}}'),
            "constraint.structural_tag",
        ),
        (Constraint("haiku", ""), "constraint"),
    ],
)
def test_bad_constraints_name_their_field(constraint, field):
    with pytest.raises(InvalidArgumentError) as caught:
        check_constraint(constraint)
    assert caught.value.violations[0].field == field
