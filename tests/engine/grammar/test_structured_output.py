import json
import time
from pathlib import Path

import pytest
import torch

from services.common.errors import InvalidArgumentError
from services.engine.grammar.schema_check import SchemaRefusedError, check_schema
from services.engine.grammar.wire import Setup
from services.engine.sampling_params import Constraint
from services.engine.structured_output import Built, SOMatcherBuilder, check_constraint

END = 256
CASES = json.loads((Path(__file__).parents[2] / "data" / "schemas.json").read_text())
MUST_COMPILE = ("enforce",)


def byte_setup(memory_bytes: int = 2 << 30) -> Setup:
    """Every byte is a token; id 256 ends."""
    vocabulary = [bytes([b]) for b in range(256)] + [b"<end>"]
    return Setup(vocabulary, "RAW", len(vocabulary), [END], memory_bytes)


@pytest.fixture(scope="module")
def builder():
    made = SOMatcherBuilder(byte_setup(), timeout_s=10)
    yield made
    made.close()


def wait_for(builder: SOMatcherBuilder, constraint: Constraint, key: str = "r") -> Built:
    builder.submit(key, constraint)
    give_up = time.monotonic() + 40
    while time.monotonic() < give_up:
        for built in builder.pump():
            if built.request_key == key:
                return built
        time.sleep(0.005)
    raise AssertionError("no grammar in 40 s")


def allows(builder: SOMatcherBuilder, built: Built, text: str) -> bool:
    matcher = builder.matcher(built.grammar)
    return all(matcher.accept(b) for b in text.encode()) and matcher.accept(END)


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
def test_public_cases_are_enforced_or_refused(builder, case):
    schema = case["schema"] if "schema" in case else generated(case["generator"])
    text = json.dumps(schema)
    started = time.monotonic()
    try:
        check_schema(text)
    except SchemaRefusedError:
        assert case["policy"] not in MUST_COMPILE or case["id"] in REFUSED_ON_PURPOSE
        return
    built = wait_for(builder, Constraint("json_schema", text), case["id"])
    assert time.monotonic() - started < 15
    if built.problem is not None:
        assert case["policy"] not in MUST_COMPILE
        return
    for value in case.get("valid", []):
        assert allows(builder, built, json.dumps(value, ensure_ascii=False)), value
    for value in case.get("invalid", []):
        assert not allows(builder, built, json.dumps(value, ensure_ascii=False)), value


# Stricter than the case asks: an undeclared name could repeat a declared one.
REFUSED_ON_PURPOSE = {"sib-addl-true"}


def test_regex_and_choice_narrow_each_draw(builder):
    built = wait_for(builder, Constraint("regex", "[ab]{2}c"))
    matcher = builder.matcher(built.grammar)
    assert allowed_ids(matcher) == {ord("a"), ord("b")}
    assert matcher.accept(ord("a"))
    assert matcher.accept(ord("b"))
    assert allowed_ids(matcher) == {ord("c")}
    assert not matcher.accept(ord("a"))
    assert matcher.accept(ord("c"))
    assert allowed_ids(matcher) == {END}
    assert not matcher.complete
    assert matcher.accept(END)
    assert matcher.complete
    choice = wait_for(builder, Constraint("choice", "", ('say "hi"', "né")), "c")
    assert allows(builder, choice, 'say "hi"')
    assert allows(builder, choice, "né")
    assert not allows(builder, choice, "n")


def allowed_ids(matcher) -> set[int]:
    words = matcher.mask()
    assert words is not None
    bits = (words[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
    return set(bits.flatten().nonzero().flatten().tolist())


def test_json_object_is_an_object(builder):
    built = wait_for(builder, Constraint("json_object", ""))
    assert allows(builder, built, '{"a": [1, {"b": null}]}')
    assert not allows(builder, built, "[1]")


def test_white_space_is_capped(builder):
    built = wait_for(builder, Constraint("json_schema", '{"type":"array","items":{"type":"null"}}'))
    assert allows(builder, built, "[\n  null\n]")
    assert not allows(builder, built, "[" + " " * 100 + "null]")


def test_replay_and_rollback_return_to_the_same_place(builder):
    built = wait_for(builder, Constraint("regex", "abcd"))
    matcher = builder.matcher(built.grammar)
    assert matcher.accept(ord("a"))
    assert matcher.accept(ord("b"))
    again = matcher.replayed([ord("a"), ord("b")])
    assert again is not None
    assert allowed_ids(again) == allowed_ids(matcher) == {ord("c")}
    assert matcher.replayed([ord("x")]) is None
    matcher.rollback(1)
    assert allowed_ids(matcher) == {ord("b")}


def test_equal_constraints_share_one_compilation_and_a_cancelled_one_is_forgotten(builder):
    constraint = Constraint("regex", "shared[0-9]+")
    for key in ("a", "b", "gone"):
        builder.submit(key, constraint)
    builder.cancel("gone")
    keys: list[str] = []
    give_up = time.monotonic() + 20
    while len(keys) < 2 and time.monotonic() < give_up:
        keys += [built.request_key for built in builder.pump()]
        time.sleep(0.005)
    assert sorted(keys) == ["a", "b"]
    assert builder.num_pending == 0


def test_a_compilation_that_takes_too_long_is_killed_and_the_next_one_works():
    hurried = SOMatcherBuilder(byte_setup(), timeout_s=0.05)
    try:
        bomb = "|".join(f"{chr(97 + i % 26)}{i}(x|y{{0,100}}){{0,40}}" for i in range(400))
        slow = wait_for(hurried, Constraint("regex", bomb))
        assert "takes longer than" in (slow.problem or "")
        quick = wait_for(hurried, Constraint("regex", "ab"), "second")
        assert quick.problem is None
    finally:
        hurried.close()


@pytest.mark.parametrize(
    ("constraint", "field"),
    [
        (Constraint("json_schema", '{"type":"integer","multipleOf":2}'), "constraint.json_schema"),
        (Constraint("regex", "("), "constraint.regex"),
        (Constraint("choice", "", ()), "constraint.choice"),
        (Constraint("choice", "", ("a", "")), "constraint.choice"),
        (Constraint("ebnf", "x" * 70_000), "constraint.ebnf"),
        (Constraint("haiku", ""), "constraint"),
    ],
)
def test_bad_constraints_name_their_field(constraint, field):
    with pytest.raises(InvalidArgumentError) as caught:
        check_constraint(constraint)
    assert caught.value.violations[0].field == field
