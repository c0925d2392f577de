"""Grammars of llguidance behind the same matcher as those of xgrammar."""

import json
import random

import jsonschema
import pytest

from services.engine.contract.sampling_params import Constraint
from services.engine.grammar.strict_engine import StrictCompiler
from services.engine.grammar.structured_output import INVALID, SOMatcherBuilder
from services.engine.grammar.wire import Ready, Setup

END = 258
PAIR = {"type": "string", "pattern": "^[ab]+$", "minLength": 2, "maxLength": 3}
pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def build(wait_for):
    def build(schema):
        built = wait_for(Constraint("json_schema", json.dumps(schema)))
        assert built.problem is None
        return built

    return build


def drawn(built, allowed_ids, seed: int) -> str | None:
    """A random answer; None if it does not end."""
    draw, matcher, text = random.Random(seed), built.grammar.matcher(), bytearray()
    for _ in range(300):
        ids = allowed_ids(matcher)
        if matcher.must_end or (END in ids and draw.random() < 0.5):
            return text.decode()
        closing = sorted(ids & set(b'"}],:')) if draw.random() < len(text) / 60 else []
        token = draw.choice(closing or sorted(ids - {END}))
        assert matcher.accept(token)
        text.append(token)
    return None


CASES = {
    "lengths and pattern": (PAIR, ["ab", "aba"], ["a", "abab", "xy", 1]),
    "pattern properties": (
        {"type": "object", "patternProperties": {"^x": {"type": "integer"}}},
        [{}, {"xa": 1}, {"b": "s"}],
        [{"xa": "s"}],
    ),
    "quotation mark": ({"type": "string", "pattern": '^a"\\\\$'}, ['a"\\'], ["a", 'a"']),
    "multiple": ({"type": "integer", "multipleOf": 5}, [0, 5, -10], [3, 7]),
    "tuple": (
        {
            "type": "array",
            "prefixItems": [{"type": "integer"}, {"type": "string"}],
            "minItems": 2,
            "maxItems": 2,
        },
        [[1, "a"]],
        [[1], [], [1, "a", 2], ["a", 1]],
    ),
    "extra of a type": (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}},
            "additionalProperties": {"type": "string"},
        },
        [{"a": 1, "b": "x"}],
        [{"a": "x"}, {"b": 1}],
    ),
    "exactly one": (
        {
            "type": "object",
            "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
            "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        [{"a": None}, {"b": None}],
        [{}, {"a": None, "b": None}],
    ),
    "not a listed text": (
        {"type": "object", "properties": {"k": {"type": "string", "not": {"enum": ["no", "on"]}}}},
        [{"k": ""}, {"k": "n"}, {"k": "nope"}, {"k": "yes"}],
        [{"k": "no"}, {"k": "on"}],
    ),
    "if": (
        {
            "type": "object",
            "properties": {"k": {"enum": ["a", "b"]}, "n": {"type": "integer"}},
            "required": ["k"],
            "if": {"properties": {"k": {"const": "a"}}},
            "then": {"required": ["n"]},
            "else": {"properties": {"n": False}},
        },
        [{"k": "a", "n": 1}, {"k": "b"}],
        [{"k": "a"}, {"k": "b", "n": 1}],
    ),
    "dependent": (
        {
            "type": "object",
            "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
            "dependentRequired": {"a": ["b"]},
        },
        [{}, {"b": None}, {"a": None, "b": None}],
        [{"a": None}],
    ),
    "unique": (
        {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True},
        [[], ["b"], ["c", "a"]],
        [["a", "a"], ["a", "b", "a"]],
    ),
    "one property of two": (
        {
            "type": "object",
            "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
            "additionalProperties": False,
            "minProperties": 1,
            "maxProperties": 1,
        },
        [{"a": None}, {"b": None}],
        [{}, {"a": None, "b": None}],
    ),
    "contains": (
        {"type": "array", "items": {"type": ["integer", "null"]}, "contains": {"type": "null"}},
        [[None], [None, 1]],
        [[], [1]],
    ),
    "merged": (
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "integer"}}},
                {"type": "object", "properties": {"a": {"minimum": 3}}, "required": ["a"]},
            ]
        },
        [{"a": 3}],
        [{}, {"a": 2}],
    ),
    "date": ({"type": "string", "format": "date"}, ["2024-02-28"], ["2024-02-30", "x"]),
    "names": (
        {"type": "object", "propertyNames": {"pattern": "^[ab]$"}},
        [{}, {"a": 1}, {"b": 1}],
        [{"c": 1}],
    ),
    "unevaluated": (
        {
            "allOf": [{"type": "object", "properties": {"a": {"type": "null"}}}],
            "properties": {"b": {"type": "null"}},
            "unevaluatedProperties": False,
        },
        [{"b": None}, {"a": None}],
        [{"c": None}],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_keywords_hold_in_every_answer(name, build, allows, allowed_ids):
    schema, valid, invalid = CASES[name]
    built = build(schema)
    assert built.grammar.backend == "llguidance"
    for value in valid:
        assert allows(built, json.dumps(value)), value
    for value in invalid:
        assert not allows(built, json.dumps(value)), value
    validator = jsonschema.Draft202012Validator(schema)
    answers = [drawn(built, allowed_ids, seed) for seed in range(12)]
    assert any(answers)
    for answer in answers:
        assert answer is None or not list(validator.iter_errors(json.loads(answer))), answer


def test_a_declared_name_cannot_hide_behind_an_escape(build, allows):
    schema = {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 2}}}
    built = build(schema)
    assert allows(built, '{"a":2}')
    assert allows(built, '{"b":"x"}')
    for text in ('{"\\u0061":"x"}', '{"b":1,"\\u0061":"x"}'):
        assert not allows(built, text)


def test_patterns_are_those_of_ecma(build, allows):
    for pattern, yes, no in [
        (r"^[a&&b]$", ["a", "&", "b"], ["", "c"]),
        (r"^[[a]$", ["[", "a"], ["b"]),
        (r"^.$", ["a", "é"], ["\n", "\r", "\u2028"]),
        (r"^\s$", [" ", "\ufeff"], ["a", "\x85"]),
        (r"^\S$", ["a"], [" ", "\ufeff"]),
        (r"^\d\w\cJ\/{x}$", ["1a\n/{x}"], ["٣a\n/{x}"]),
        ("b", ["b", "abc"], ["a"]),
        ('^[^"]$', ["a", "\n", "\\"], ['"']),
        (r"^[^\\]$", ["a", '"'], ["\\"]),
        ('^"[^"\\\\\n]*"$', ['"a"'], ['"a"b"', '"a\\b"']),
        (r"^[\x00-\x1f]$", ["\n"], ['"', "\\"]),
        (r"^[\w\s-]$", ["a", "\n", "-"], ['"', "\\"]),
        (r"^[^\p{L}]$", ["1"], ["é"]),
    ]:
        built = build({"type": "string", "pattern": pattern, "maxLength": 9})
        for text in yes:
            assert allows(built, json.dumps(text, ensure_ascii=False)), (pattern, text)
        for text in no:
            assert not allows(built, json.dumps(text, ensure_ascii=False)), (pattern, text)


def test_white_space_is_capped_and_text_is_utf8(build, allows, allowed_ids):
    built = build({"type": "array", "items": PAIR})
    assert allows(built, '[\n  "ab"\n]')
    assert not allows(built, "[" + " " * 9 + '"ab"]')
    matcher = build({"type": "string", "minLength": 1, "pattern": "."}).grammar.matcher()
    for byte in b'"\xed':
        assert matcher.accept(byte)
    assert allowed_ids(matcher) == set(range(0x80, 0xA0))


@pytest.mark.parametrize("schema", [PAIR, {"type": "string", "enum": ["aab", "aac"]}])
def test_rollback_and_forced_text_are_the_same_for_both_engines(schema, build, allowed_ids):
    built = build(schema)
    matcher, again = built.grammar.matcher(), built.grammar.matcher()
    masks = []
    for byte in b'"aab"':
        masks.append(matcher.mask.copy())
        assert matcher.accept(byte)
    assert matcher.accept(END)
    assert allowed_ids(matcher) == set()
    assert matcher.forced() == b""
    for back in range(1, 7):
        matcher.rollback(1)
        if back > 1:
            assert (matcher.mask == masks[6 - back]).all()
    assert not matcher.rollback(1)
    assert (matcher.mask == again.mask).all()
    assert matcher.replay(list(b'"aab"'))
    assert matcher.must_end
    if "enum" in schema:
        assert again.forced() == b'"aa'
    assert not again.accept(ord("x"))
    assert again.replay(list(b'"aab"'))


def test_any_of_several_end_tokens_ends_an_answer(wait_for):
    builder = SOMatcherBuilder(Setup("", 300, [256, END], 2 << 30), timeout_s=10)
    try:
        constraint = Constraint("json_schema", json.dumps({"type": "integer", "multipleOf": 2}))
        built = wait_for(constraint, builder=builder)
        for end in (256, END):
            matcher = built.grammar.matcher()
            assert not matcher.accept(end)
            assert matcher.replay(list(b"12"))
            assert not matcher.must_end
            assert matcher.accept(end)
            assert matcher.must_end
            assert not matcher.mask.any()
    finally:
        builder.close()


def test_tokens_of_several_bytes_are_forced_as_the_longest_ones():
    vocabulary = [bytes([i]) for i in range(256)] + [b"12", b"123", b"\xff<e>"]
    compiler = StrictCompiler(Setup("", 259, [258], 1 << 30), Ready(vocabulary))
    matcher = compiler.start(compiler.compile({"enum": [1234]}))
    assert matcher.compute_ff_tokens() == [257, ord("4")]


def test_what_the_engine_does_not_compile_is_refused(wait_for):
    never = {"allOf": [{"type": "string"}, {"type": "integer"}]}
    built = wait_for(Constraint("json_schema", json.dumps(never)))
    assert built.grammar is None
    assert built.reason == INVALID
    assert "Unsatisfiable" in built.problem


def test_a_matcher_that_exceeds_the_engines_limits_counts_as_slow(build, monkeypatch):
    matcher = build(PAIR).grammar.matcher()
    monkeypatch.setattr(type(matcher._state), "has_failed", property(lambda state: True))
    assert matcher.accept(ord('"'))
    assert matcher.slow
    assert not matcher.mask.any()


PLAIN = Ready([bytes([i]) for i in range(256)])


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (
            {"type": "string", "pattern": "^a$", "minLength": 3},
            "cannot be enforced: no text meets the pattern, format, lengths and values of a string",
        ),
        (
            {"type": "string", "pattern": "*a"},
            "cannot be enforced: a pattern is not a valid regular expression: "
            "repetition operator missing expression",
        ),
        (
            {"allOf": [{"type": "string"}, {"type": "integer"}]},
            "cannot be enforced: Unsatisfiable schema: incompatible types",
        ),
    ],
)
def test_a_problem_of_the_engine_is_one_plain_sentence(schema, problem):
    compiler = StrictCompiler(Setup("", 259, [258], 1 << 30), PLAIN)
    with pytest.raises(ValueError, match=r"^cannot") as caught:
        compiler.compile(schema)
    assert str(caught.value) == problem
