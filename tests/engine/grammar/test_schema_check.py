import json
from pathlib import Path

import pytest

from services.engine.grammar.regex_check import json_pattern_problem, regex_problem
from services.engine.grammar.schema_check import check_schema
from services.engine.grammar.schema_refused import SchemaRefusedError


def refused_at(schema) -> str:
    with pytest.raises(SchemaRefusedError) as caught:
        check_schema(json.dumps(schema))
    return caught.value.path


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "array", "items": True, "uniqueItems": True}, "/uniqueItems"),
        ({"type": "integer", "multipleOf": 5}, "/multipleOf"),
        ({"type": "object", "properties": {"a": {"not": {}}}}, "/properties/a/not"),
        ({"type": "object", "required": ["a"]}, "/required"),
        (
            {"type": "object", "properties": {"a": {}}, "additionalProperties": True},
            "/additionalProperties",
        ),
        ({"type": "string", "pattern": "a", "maxLength": 2}, "/pattern"),
        ({"type": "string", "pattern": "a{129}"}, "/pattern"),
        ({"type": "string", "maxLength": 10**9}, "/maxLength"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "/maxLength"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, ""),
        ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, ""),
        ({"anyOf": [{"type": "string"}], "properties": {}}, "/properties"),
        ({"$ref": "#/$defs/s", "maxLength": 2, "$defs": {"s": {"type": "string"}}}, "/maxLength"),
        ({"$ref": "https://example.com/s"}, "/$ref"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "/$ref"),
        ({"oneOf": [{"type": "integer", "minimum": 0}, {"type": "number"}]}, "/oneOf"),
        ({"allOf": [{"type": "object"}, {"type": "object"}]}, "/allOf"),
        ({"type": "string", "enum": ["red", 7]}, "/enum"),
        ({"type": "thing"}, "/type"),
        ({"type": [[]]}, "/type"),
        ({"properties": {}, "required": [[]]}, "/required"),
        ({"$ref": "#/$defs/b", "$defs": None}, "/$defs"),
        ({"$ref": "#/$defs/b", "$defs": "abc"}, "/$defs"),
        ({"properties": {"a": False}}, "/properties/a"),
        ({"minLength": 3, "maximum": 2, "multipleOf": 2}, "/multipleOf"),
        (False, ""),
    ],
)
def test_what_cannot_hold_is_refused_by_its_path(schema, path):
    assert refused_at(schema) == path


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0}},
            "required": ["a"],
            "additionalProperties": False,
            "title": "T",
            "description": "d",
        },
        {"type": ["string", "null"], "maxLength": 5},
        {"oneOf": [{"type": "string"}, {"type": "integer"}]},
        {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]},
                {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"]},
            ]
        },
        {
            "$ref": "#/$defs/node",
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
                }
            },
        },
        {"type": "array", "items": {"enum": ["a", 1, None]}, "minItems": 1, "maxItems": 4},
        {"type": "string", "pattern": "^[a-z]{1,128}$"},
    ],
)
def test_what_holds_is_taken(schema):
    assert check_schema(json.dumps(schema)) == schema


def test_depth_and_size_are_bounded():
    deep: dict = {"type": "string"}
    for _ in range(60):
        deep = {"type": "array", "items": deep}
    assert "items" in refused_at(deep)
    refused_at({"type": "object", "properties": {str(i): True for i in range(5000)}})
    for text in ("{" * 50_000, '{"type": "object", "type": "string"}'):
        with pytest.raises(SchemaRefusedError, match="not JSON"):
            check_schema(text)


def test_no_schema_keeps_the_check_busy():
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(1500)}
    wide = "[a-\U0010ffff]" * 100
    for schema, path in [
        ({"$ref": "#/$defs/d0", "$defs": chain}, "/$ref"),
        ({"oneOf": [{"const": i} for i in range(65)]}, "/oneOf"),
        (
            {
                "type": "object",
                "properties": {n: {"type": "string", "pattern": wide} for n in "ab"},
            },
            "/properties/b/pattern",
        ),
        ({"type": "string", "pattern": wide * 2}, "/pattern"),
    ]:
        assert refused_at(schema) == path


def test_branches_with_equal_numbers_are_not_disjoint():
    assert refused_at({"oneOf": [{"const": 1}, {"const": 1.0}]}) == "/oneOf"
    assert refused_at({"oneOf": [{"const": [{"a": 1}]}, {"const": [{"a": 1.0}]}]}) == "/oneOf"
    assert check_schema('{"oneOf": [{"const": 1}, {"const": true}]}')


@pytest.mark.parametrize(
    ("pattern", "word"),
    [
        ("((a{0,100}){0,100}){0,100}", "copies"),
        ("a{2,}b{0,129}", "128"),
        ("(?=a)b", "look-ahead"),
        (r"(a)\1", "back-references"),
        ("(", "valid"),
        ("x" * 5000, "characters"),
        ("a(^b)", "beginning"),
        ("a^b", "beginning"),
        ("(a$)b", "end"),
        (r"\Aab\Z", r"\A"),
        ("(?i)ab", "not supported"),
        ("a++b", "possessive"),
        (r"\011", "not supported"),
    ],
)
def test_patterns_that_would_hurt_are_refused(pattern, word):
    assert word in (regex_problem(pattern) or "")


@pytest.mark.parametrize(
    "pattern", [r"[a-z]{3,8}", r"\d{4}-\d{2}", r"[{}]{2}", r"\\b", "(ab|c){5}"]
)
def test_usual_patterns_are_taken(pattern):
    assert regex_problem(pattern) is None


@pytest.mark.parametrize(
    "pattern", ['"', 'a"+', r"a\\b", "a\tb", r"\n", r"\x22", r"\u000a", '["]', r"[\n\r]", r'\["\]']
)
def test_what_json_escapes_is_refused_in_patterns_of_strings_only(pattern):
    assert "quotation mark" in (json_pattern_problem(pattern) or "")
    assert regex_problem(pattern) is None


@pytest.mark.parametrize(
    "pattern", ['[^"]', "[ -~]+", "^a$|^b", "[*+]+", r"[\]a]", r"\[a\]", "a[$^]b", r"\$\^"]
)
def test_usual_patterns_of_strings_are_taken(pattern):
    assert json_pattern_problem(pattern) is None


def test_the_public_cases_have_a_decision_each():
    cases = json.loads((Path(__file__).parents[2] / "data" / "schemas.json").read_text())
    assert len(cases) == 39
