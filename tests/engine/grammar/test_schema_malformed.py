"""Malformed and hostile schemas: a refusal by path, soon, and nothing else."""

import json
import random
import time

import pytest

from services.engine.grammar.schema_form import BY_TYPE
from services.engine.grammar.schema_normal import OF_TYPE
from services.engine.grammar.schema_plan import plan_schema
from services.engine.grammar.schema_refused import SchemaRefusedError


def refusal(schema) -> SchemaRefusedError | None:
    try:
        plan_schema(json.dumps(schema))
    except SchemaRefusedError as error:
        return error
    return None


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "string", "pattern": "abc\\"}, "/pattern"),
        ({"type": "string", "pattern": "[abc\\"}, "/pattern"),
        ({"patternProperties": {"a\\": {}}}, "/patternProperties/a\\"),
        ({"properties": {"a": {"pattern": "(b"}}}, "/properties/a/pattern"),
        ({"pattern": "b)"}, "/pattern"),
        ({"pattern": "[z-a]"}, "/pattern"),
        ({"pattern": "b{2,1}"}, "/pattern"),
        ({"dependentRequired": 5, "dependencies": {"a": ["b"]}}, "/dependentRequired"),
        ({"dependentSchemas": [1], "dependencies": {"a": {}}}, "/dependentSchemas"),
        ({"$ref": f"#/allOf/{'9' * 5000}", "allOf": [{}]}, "/$ref"),
        (
            {"properties": {"9" * 5000: {"uniqueItems": True}}},
            f"/properties/{'9' * 5000}/uniqueItems",
        ),
    ],
)
def test_a_malformed_value_is_refused_by_its_path(schema, path):
    error = refusal(schema)
    assert error is not None
    assert error.path == path


def test_a_long_number_in_a_path_is_a_name():
    from services.engine.grammar.schema_simplify import Simplified

    path = f"/allOf/{'9' * 5000}"
    assert Simplified({"allOf": [{}]}).path_of(path) == path


@pytest.mark.parametrize(
    "pattern",
    [
        r"[\u{61}-\u{7a}]+",
        r"(?<y>\p{L}+)-(?:b|[(])",
        r"a**",
        r"[\cA-\cZ]",
        r"a{,2}\/",
        r"[^\[(]{2}",
    ],
)
def test_a_pattern_that_is_valid_passes_the_check_of_its_form(pattern):
    assert refusal({"type": "string", "pattern": pattern, "maxLength": 9}) is None


VALUES = (
    *(None, True, False, 0, -1, 3, 1.5, 1e308, 10**400, "", "a", "(", "\\", "#", "#/0", "\ud800"),
    *([], [[]], [1], ["a"], [{}], [None], {}, {"a": 5}, {"a": []}, {"a": ["b"]}, {"": {}}),
    *({"a": {"type": "integer"}}, {"type": 3}, {"(": {}}, {"$ref": "#"}),
)
KEYWORDS = sorted(
    {
        *frozenset().union(*OF_TYPE.values(), *BY_TYPE.values()),
        *("$ref", "$defs", "definitions", "$id", "id", "$anchor", "$dynamicAnchor", "$dynamicRef"),
        *("$recursiveRef", "type", "enum", "const", "allOf", "anyOf", "oneOf", "not", "if", "then"),
        *("else", "dependencies", "title", "discriminator"),
    }
)


def test_nothing_but_a_refusal_leaves_the_check():
    for keyword in KEYWORDS:
        for value in VALUES:
            for beside in ({}, {"type": "object"}, {"type": ["array", "string", "number"]}):
                refusal({**beside, keyword: value})
    draw = random.Random(7)
    for _ in range(3000):
        schema = {key: draw.choice(VALUES) for key in draw.sample(KEYWORDS, draw.randint(2, 4))}
        refusal({"not": schema} if draw.random() < 0.2 else schema)


def test_what_is_evaluated_is_read_once():
    def level(number):
        return {"allOf": [{"$ref": f"#/$defs/d{number}"}] * 28}

    schema = {
        "$defs": {"d0": {"properties": {"a": {}}}, **{f"d{i + 1}": level(i) for i in range(4)}},
        "$ref": "#/$defs/d4",
        "unevaluatedProperties": False,
    }
    began = time.thread_time()
    refusal(schema)
    assert time.thread_time() - began < 0.5


def test_reading_what_is_evaluated_again_and_again_is_refused():
    wide = {"allOf": [{}] * 1500}
    user = {"$ref": "#/$defs/a", "unevaluatedProperties": False}
    schema = {"$defs": {"a": wide}, "properties": {f"p{i}": user for i in range(600)}}
    began = time.thread_time()
    error = refusal(schema)
    assert error is not None
    assert "too large" in error.problem
    assert time.thread_time() - began < 1


@pytest.mark.parametrize(
    "names",
    [
        {"type": "integer"},
        {"type": ["integer", "null"], "pattern": "^a"},
        {"type": "integer", "enum": ["a"]},
        {"$ref": "#/$defs/n"},
        False,
    ],
)
def test_names_that_are_no_strings_leave_no_property(names):
    schema = {"propertyNames": names, "$defs": {"n": {"type": "integer"}}}
    plan = plan_schema(json.dumps(schema)).schema
    plan.pop("$defs", None)
    assert plan == {"type": "object", "additionalProperties": False}
    some = {"propertyNames": {"type": ["string", "null"]}, "type": "object"}
    assert plan_schema(json.dumps(some)).schema == {"type": "object"}


@pytest.mark.parametrize(
    ("keyword", "kind"),
    [
        ({"multipleOf": 5}, "number"),
        ({"minProperties": 1}, "object"),
        ({"maxProperties": 1}, "object"),
        ({"patternProperties": {"^a": {"type": "null"}}}, "object"),
        ({"format": "date"}, "string"),
    ],
)
def test_a_keyword_without_a_type_implies_its_own(keyword, kind):
    assert plan_schema(json.dumps(keyword)).schema == {**keyword, "type": kind}
