"""Which engine enforces a schema, or the path of the keyword that none does."""

import json
import re
import time

import pytest

from services.engine.grammar import schema_plan
from services.engine.grammar.schema_plan import (
    LLGUIDANCE,
    XGRAMMAR,
    SchemaPlan,
    backend_of,
    plan_schema,
)
from services.engine.grammar.schema_refused import SchemaRefusedError

SIMPLE = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def plan(schema):
    return plan_schema(json.dumps(schema))


def refused_at(schema) -> str:
    with pytest.raises(SchemaRefusedError) as caught:
        plan(schema)
    return caught.value.path


@pytest.mark.parametrize(
    "extra",
    [
        {"uniqueItems": False},
        {"minProperties": 0},
        {"additionalProperties": True},
        {"patternProperties": {}},
        {"allOf": []},
        {"id": "http://example.com/s"},
        {"$anchor": "a"},
        {"$comment": "c"},
        {"example": {"a": 1}},
        {"enumNames": ["x"]},
        {"markdownDescription": "m"},
        {"x-anything": {"not": {}}},
        {"readonly": True},
        {"nobody knows this": [1]},
        {"minLength": 3},
        {"dependencies": {}},
        {"not": False},
        {"unevaluatedProperties": True},
        {"if": {"required": ["a"]}},
    ],
)
def test_what_constrains_nothing_is_as_if_it_were_absent(extra):
    assert plan({**SIMPLE, **extra}) == plan(SIMPLE)
    inside = {"type": "array", "items": SIMPLE}
    assert plan({"type": "array", "items": {**SIMPLE, **extra}}) == plan(inside)


ITEMS = {"type": "array", "items": {"type": "string"}}


@pytest.mark.parametrize(
    ("schema", "extra"),
    [
        (ITEMS, {"uniqueItems": False}),
        (ITEMS, {"minItems": 0}),
        (ITEMS, {"unevaluatedItems": True}),
        (ITEMS, {"minContains": 1}),
        ({"type": "string"}, {"minLength": 0}),
        (SIMPLE, {"propertyNames": {}}),
        (SIMPLE, {"dependentRequired": {}}),
    ],
)
def test_what_constrains_nothing_of_its_own_type_is_as_if_it_were_absent(schema, extra):
    assert plan({**schema, **extra}) == plan(schema)


def tagged(kind: str, required: bool = True) -> dict:
    schema = {"type": "object", "properties": {"kind": {"const": kind}, "n": {"type": "integer"}}}
    return {**schema, "required": ["kind"]} if required else schema


def test_a_tagged_union_is_enforced():
    schema = {
        "$defs": {"A": tagged("a"), "B": tagged("b")},
        "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
        "discriminator": {"propertyName": "kind", "mapping": {"a": "#/$defs/A"}},
    }
    assert plan(schema).backend == XGRAMMAR
    assert "anyOf" in plan(schema).schema
    # Without `required` both hold for {}: the tag becomes required.
    loose = {"oneOf": [tagged("a", required=False), tagged("b", required=False)]}
    assert plan(loose).backend == XGRAMMAR
    assert [branch["required"] for branch in plan(loose).schema["anyOf"]] == [["kind"], ["kind"]]


@pytest.mark.parametrize("name", ["50%25", "50%"])
def test_references_are_decoded(name):
    schema = {"$ref": f"#/$defs/{name}", "$defs": {"50%": {"type": "integer"}}}
    assert plan(schema).schema["$defs"] == {"d1": {"type": "integer"}}


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "null"}}}, {"type": "null"}),
        ({"$ref": "#/$defs/a%7E1b", "$defs": {"a/b": {"type": "null"}}}, {"type": "null"}),
        ({"$ref": "#x", "$defs": {"a": {"$anchor": "x", "type": "null"}}}, {"type": "null"}),
        (
            {"$id": "http://e.x/a", "$ref": "b", "$defs": {"a": {"$id": "b", "type": "null"}}},
            {"type": "null"},
        ),
    ],
)
def test_references_find_pointers_anchors_and_embedded_ids(schema, found):
    assert plan(schema).schema["$defs"]["d1"] == found


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            {"type": "integer", "minimum": 3, "exclusiveMinimum": True},
            {"type": "integer", "exclusiveMinimum": 3},
        ),
        (
            {"type": "integer", "maximum": 3, "exclusiveMaximum": False},
            {"type": "integer", "maximum": 3},
        ),
        (
            {"type": "array", "items": [{"type": "null"}], "additionalItems": False},
            {"type": "array", "prefixItems": [{"type": "null"}], "items": False},
        ),
        (
            {"type": "object", "dependencies": {"a": ["b"], "c": {"required": ["d"]}}},
            {
                "type": "object",
                "dependentRequired": {"a": ["b"]},
                "dependentSchemas": {"c": {"required": ["d"]}},
            },
        ),
        (
            {"$ref": "#/definitions/a", "definitions": {"a": {"type": "null"}}},
            {"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}},
        ),
    ],
)
def test_forms_of_older_drafts_are_those_of_2020(old, new):
    assert plan(old) == plan(new)


@pytest.mark.parametrize(
    ("schema", "backend"),
    [
        (SIMPLE, XGRAMMAR),
        ({"type": "string", "pattern": "^a+$"}, XGRAMMAR),
        ({"type": "string", "pattern": "^a+$", "maxLength": 3}, LLGUIDANCE),
        ({"type": "string", "pattern": 'a"b\\\\'}, LLGUIDANCE),
        ({"type": "object", "patternProperties": {"^a": {"type": "null"}}}, LLGUIDANCE),
        ({"type": "integer", "multipleOf": 5}, LLGUIDANCE),
        ({"type": "array", "items": {"type": "string", "format": "date"}}, LLGUIDANCE),
        ({**SIMPLE, "additionalProperties": {"type": "string"}}, LLGUIDANCE),
        ({"allOf": [SIMPLE, {"type": "object", "required": ["b"]}]}, LLGUIDANCE),
        ({"type": "object", "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, LLGUIDANCE),
    ],
)
def test_the_second_engine_is_used_only_where_the_first_cannot_enforce_a_schema(schema, backend):
    assert plan(schema).backend == backend


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, "/uniqueItems"),
        ({"properties": {"a": {"not": {"pattern": "a"}}}}, "/properties/a/not"),
        ({"$defs": {"a": {"not": {}}}, "$ref": "#/$defs/a"}, "/$defs/a/not"),
        ({"allOf": [{"items": {"type": "string", "pattern": "(?=a)"}}]}, "/allOf/0/items/pattern"),
        ({"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}, "/oneOf"),
        ({"$ref": "other.json"}, "/$ref"),
        ({"$ref": "#/$defs/none"}, "/$ref"),
        ({"items": {"$dynamicRef": "#a"}}, "/items/$dynamicRef"),
        ({"properties": {"a": {"required": True}}}, "/properties/a/required"),
        ({"anyOf": [{"type": "string"}, {"type": "thing"}]}, "/anyOf/1/type"),
        ({"anyOf": []}, "/anyOf"),
        ({"minLength": 3, "maxLength": 2}, "/maxLength"),
        ({"type": "number", "multipleOf": 0}, "/multipleOf"),
        ({"required": ["a"], "properties": {"a": {"$ref": "#"}}}, "/required"),
        (
            {
                "items": {"$ref": "#/$defs/a"},
                "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {}]}},
            },
            "/$defs/a/allOf",
        ),
    ],
)
def test_what_no_engine_enforces_is_refused_by_the_path_that_was_sent(schema, path):
    assert refused_at(schema) == path


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"dependencies": {"a": 5}}, "/dependencies/a"),
        ({"items": [5]}, "/items/0"),
        ({"items": [{}], "additionalItems": 5}, "/additionalItems"),
        ({"propertyNames": {"pattern": 5}}, "/propertyNames/pattern"),
        ({"required": ["a"], "properties": {"a": {"$ref": "#", "required": ["b"]}}}, "/required"),
        ({"anyOf": [{"$ref": "#", "type": "object"}]}, "/anyOf"),
        (
            {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a", "type": "object"}}},
            "/$defs/a/$ref",
        ),
    ],
)
def test_a_path_is_the_one_that_was_sent(schema, path):
    assert refused_at(schema) == path


@pytest.mark.parametrize(
    ("name", "written"),
    [("iri", "uri"), ("uri-reference", "uri"), ("idn-email", "email"), ("date", "date")],
)
def test_formats_are_enforced_as_they_are_or_narrower(name, written):
    schema = {"type": ["string", "null"], "format": name, "pattern": "^a"}
    assert plan(schema) == SchemaPlan(LLGUIDANCE, {**schema, "format": written})
    assert plan({"format": name}).schema == {"type": "string", "format": written}
    assert plan({"type": "string", "format": "color"}) == plan({"type": "string"})
    assert plan({"properties": {"format": {"type": "null"}}}).backend == XGRAMMAR


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        ("json-pointer", ["", "/a~0/b~1/"], ["a", "/~2"]),
        ("relative-json-pointer", ["0", "12#", "1/a"], ["01", "-1", "#"]),
        ("regex", ["", "^a+[a-z]*\\d$", "[^0-9a]?"], ["[", "a**", "(", "*", "\\"]),
    ],
)
def test_the_pattern_of_a_format_allows_only_what_has_it(name, valid, invalid):
    pattern = re.compile(plan({"type": "string", "format": name}).schema["pattern"])
    assert all(pattern.search(text) for text in valid)
    assert not any(pattern.search(text) for text in invalid)


def test_a_number_as_text_is_taken_as_pydantic_writes_it():
    pattern = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
    written = plan({"type": "string", "pattern": pattern}).schema
    assert written["pattern"] == r"^[+-]?0*\d*\.?\d*$"
    assert written["allOf"] == [{"type": "string", "pattern": "[^-+.]"}]


def test_a_schema_that_comes_again_is_planned_once(monkeypatch):
    text = json.dumps({"const": "planned once"})
    assert backend_of(text) == XGRAMMAR
    monkeypatch.setattr(schema_plan, "plan_schema", None)
    assert backend_of(text) == XGRAMMAR


_BIG = {
    "properties": {
        f"p{i}": {"properties": {f"q{j}": {"minimum": j} for j in range(6)}} for i in range(40)
    }
}
_WIDE = {"properties": {f"x{i}": {} for i in range(64)}, "additionalProperties": False}


@pytest.mark.parametrize(
    "schema",
    [
        {
            "$defs": {"b": _BIG},
            "properties": {f"x{n}": {"not": {"$ref": "#/$defs/b"}} for n in range(900)},
        },
        {
            "$defs": {
                **{
                    f"c{i}": {
                        "properties": {f"z{k}": {"$ref": f"#/$defs/c{i + 1}"} for k in range(40)}
                    }
                    for i in range(5)
                },
                "c5": _BIG,
            },
            "not": {"$ref": "#/$defs/c0"},
        },
        {
            "$defs": {"b": {"enum": [f"{i:04d}" for i in range(490)]}},
            "properties": {f"x{n}": {"not": {"$ref": "#/$defs/b"}} for n in range(900)},
        },
        {"properties": {f"y{m}": {**_WIDE, "maxProperties": 1} for m in range(40)}},
    ],
    ids=["excluded often", "excluded deep", "listed values", "choices of properties"],
)
def test_what_takes_long_to_rewrite_is_refused_soon(schema):
    began = time.thread_time()
    refused_at(schema)
    assert time.thread_time() - began < 2


def test_many_choices_of_properties_are_not_listed():
    wide = {"properties": {f"x{n}": {} for n in range(900)}, "additionalProperties": False}
    began = time.thread_time()
    assert plan({**wide, "maxProperties": 450}).backend == LLGUIDANCE
    assert time.thread_time() - began < 2


def test_rewriting_is_bounded():
    wide = {"oneOf": [{"required": [f"a{i}", f"b{i}"]} for i in range(12)]}
    for _ in range(5):
        wide = {"type": "object", "oneOf": [wide, {"required": ["x"]}], "not": wide}
    assert refused_at(wide).startswith("/")
    deep: dict = {"required": ["a"]}
    for _ in range(60):
        deep = {"not": deep}
    refused_at(deep)
    refused_at({"oneOf": [{"const": i} for i in range(65)]})
