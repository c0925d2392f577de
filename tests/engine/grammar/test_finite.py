import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.grammar.schema_check import check_schema
from services.engine.grammar.schema_refused import SchemaRefusedError
from services.engine.grammar.tag_check import check_tag

TOP = {"$ref": "#"}
A, B = {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}
NEVER = {"properties": {"b": A}, "required": ["b"]}
NOTHING = object()


def refusal(text: str, check=check_schema) -> SchemaRefusedError:
    with pytest.raises(SchemaRefusedError) as caught:
        check(text)
    return caught.value


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "object", "properties": {"a": TOP}, "required": ["a"]}, "/required"),
        ({"type": "array", "items": TOP, "minItems": 1}, "/minItems"),
        ({"properties": {"x": A}, "$defs": {"a": NEVER}}, "/$defs/a/required"),
        ({"properties": {"x": A}, "required": ["x"], "$defs": {"a": NEVER}}, "/$defs/a/required"),
        ({"items": A, "$defs": {"a": NEVER}}, "/$defs/a/required"),
        ({"additionalProperties": A, "$defs": {"a": NEVER}}, "/$defs/a/required"),
        ({"prefixItems": [True, A], "$defs": {"a": NEVER}}, "/$defs/a/required"),
        ({"anyOf": [{"type": "null"}, A], "$defs": {"a": NEVER}}, "/$defs/a/required"),
        (
            {"oneOf": [{"type": "null"}, A], "$defs": {"a": {**NEVER, "type": "object"}}},
            "/$defs/a/required",
        ),
        ({"anyOf": [{"type": "array", "minItems": 1, "items": TOP}]}, "/anyOf/0/minItems"),
        ({"anyOf": [TOP]}, "/anyOf"),
        ({"$ref": "#/$defs/a", "$defs": {"a": B, "b": {"allOf": [A]}}}, "/$defs/b/allOf"),
        (
            {"properties": {"k": {"properties": {"t": TOP}, "required": ["t"]}}, "required": ["k"]},
            "/required",
        ),
    ],
)
def test_a_schema_without_a_finite_value_is_refused_by_its_path(schema, path):
    error = refusal(json.dumps(schema))
    assert (error.path, error.problem) == (
        path,
        "no finite value satisfies it: every value must contain another one",
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": TOP}},
        {"items": TOP},
        {"additionalProperties": TOP},
        {"prefixItems": [TOP]},
        {"type": ["object", "null"], "properties": {"a": TOP}, "required": ["a"]},
        {"anyOf": [{"type": "null"}, {"properties": {"a": TOP}, "required": ["a"]}]},
        {"properties": {"a": {"items": TOP}}, "required": ["a"]},
        {"type": "array", "items": A, "maxItems": 0, "$defs": {"a": NEVER}},
        {"type": "string", "$defs": {"a": NEVER}},
        {"properties": {"a": {"type": "array", "minItems": 2}}, "required": ["a"]},
    ],
)
def test_what_can_end_is_taken(schema):
    assert check_schema(json.dumps(schema)) == schema


def test_a_long_chain_of_definitions_is_decided():
    chain: dict[str, Any] = {
        f"d{i}": {"properties": {"n": {"$ref": f"#/$defs/d{i + 1}"}}, "required": ["n"]}
        for i in range(700)
    }
    first = {"$ref": "#/$defs/d0"}
    assert check_schema(json.dumps({**first, "$defs": {**chain, "d700": {"type": "null"}}}))
    error = refusal(
        json.dumps({**first, "$defs": {**chain, "d700": {"items": A, "minItems": 1}, "a": NEVER}})
    )
    assert error.path == "/$defs/a/required"
    error = refusal(json.dumps({**first, "$defs": {**chain, "d700": first}}))
    assert error.path.startswith("/$defs/d")


def test_schemas_of_a_structural_tag_must_end_too():
    endless = {"type": "array", "items": TOP, "minItems": 1}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": endless}}
    assert refusal(json.dumps(tag), check_tag).path == "/format/json_schema/minItems"


@pytest.mark.parametrize("number", ["1e400", "-1e400", "NaN", "Infinity", "9" * 400])
def test_numbers_beyond_a_double_are_refused_by_their_path(number):
    for text, path in [
        (f'{{"const": {number}}}', "/const"),
        (f'{{"enum": [1, {{"k": [{number}]}}]}}', "/enum/1/k/0"),
        (f'{{"properties": {{"n": {{"minimum": {number}}}}}}}', "/properties/n/minimum"),
        (f'{{"type": "string", "default": {number}}}', "/default"),
    ]:
        error = refusal(text)
        assert error.path == path
        assert "finite number" in error.problem
    tag = f'{{"type": "structural_tag", "format": {{"type": "token", "token": {number}}}}}'
    assert refusal(tag, check_tag).path == "/format/token"
    assert check_schema('{"enum": [1e308, -1e308, 1e-400, true]}')


def objects(inner):
    def built(members, needed, types):
        required = [name for name in members if name in needed]
        return {"type": types, "properties": members, "required": required}

    names = st.sampled_from("xy")
    maps = st.fixed_dictionaries({"type": st.just("object"), "additionalProperties": inner})
    types = st.sampled_from(["object", "object", ["object", "null"], ["array", "object"]])
    listed = st.builds(
        built, st.dictionaries(names, inner, max_size=2), st.sets(names, min_size=1), types
    )
    return maps | listed


def arrays(inner):
    lengths = st.sampled_from(
        [{}, {"minItems": 1}, {"minItems": 2, "maxItems": 2}, {"maxItems": 0}]
    )
    tuples = st.lists(inner, min_size=1, max_size=2).map(lambda p: {"prefixItems": p})
    return st.builds(lambda i, n: {"type": "array", "items": i, **n}, inner, lengths) | tuples


def branches(inner):
    anyof = st.lists(inner, min_size=1, max_size=2).map(lambda b: {"anyOf": b})
    return anyof | inner.map(lambda b: {"allOf": [b]})


NODES = st.recursive(
    st.sampled_from([TOP, A, B, A, B, {"type": "null"}, {"const": 1}]).map(dict),
    lambda inner: st.one_of(objects(inner), arrays(inner), branches(inner)),
    max_leaves=4,
)
WHOLE = st.one_of(objects(NODES), arrays(NODES), branches(NODES))
SCHEMAS = st.builds(lambda top, a, b: {**top, "$defs": {"a": a, "b": b}}, WHOLE, WHOLE, WHOLE)


class Search:
    """Looks for a value of each schema by writing one, nested at most `fuel` schemas deep."""

    def __init__(self, root) -> None:
        self.root = root
        self.tried: dict[tuple[int, int], Any] = {}

    def target(self, ref: str) -> Any:
        return self.root if ref == "#" else self.root["$defs"][ref[-1]]

    def value(self, schema: Any, fuel: int) -> Any:
        key = (id(schema), fuel)
        if key not in self.tried:
            self.tried[key] = self.written(schema, fuel - 1) if fuel else NOTHING
        return self.tried[key]

    def written(self, schema: Any, fuel: int) -> Any:
        if "$ref" in schema:
            return self.value(self.target(schema["$ref"]), fuel)
        for branch in schema.get("anyOf", schema.get("allOf", [])):
            if (value := self.value(branch, fuel)) is not NOTHING:
                return value
        if "anyOf" in schema or "allOf" in schema:
            return NOTHING
        if "const" in schema:
            return schema["const"]
        types = schema.get("type", "array" if "prefixItems" in schema else "null")
        if "null" in types:
            return None
        if "array" in types:
            item = self.value(schema["items"], fuel) if schema.get("minItems") else None
            return NOTHING if item is NOTHING else [item] * schema.get("minItems", 0)
        value = {n: self.value(schema["properties"][n], fuel) for n in schema.get("required", [])}
        return NOTHING if NOTHING in value.values() else value

    def loops(self, schema: Any, above: tuple[Any, ...] = ()) -> bool:
        """Whether it applies to the same value twice: a validator would never come back."""
        steps = schema.get("anyOf", []) + schema.get("allOf", [])
        steps += [self.target(schema["$ref"])] if "$ref" in schema else []
        above = (*above, schema)
        return any(any(step is one for one in above) or self.loops(step, above) for step in steps)

    def reached(self) -> list[Any]:
        found, todo = [], [self.root]
        while todo:
            schema = todo.pop()
            if any(schema is one for one in found):
                continue
            found.append(schema)
            todo += schema.get("properties", {}).values()
            for key in ("anyOf", "allOf", "prefixItems"):
                todo += schema.get(key, [])
            if "additionalProperties" in schema:
                todo.append(schema["additionalProperties"])
            if "items" in schema and schema.get("maxItems") != 0:
                todo.append(schema["items"])
            if "$ref" in schema:
                todo.append(self.target(schema["$ref"]))
        return found


@settings(max_examples=300, deadline=None)
@given(SCHEMAS)
def test_the_decision_is_that_of_a_search_for_values(schema):
    schema = json.loads(json.dumps(schema))  # no schema in two places
    search = Search(schema)
    reached = search.reached()
    fuel = len(reached) + 1
    values = [(one, search.value(one, fuel)) for one in reached]
    endless = [one for one, value in values if value is NOTHING]
    validator = jsonschema.Draft202012Validator(schema)
    if not any(search.loops(one) for one in reached):
        for one, value in values:
            assert value is NOTHING or validator.evolve(schema=one).is_valid(value)
    if not endless:
        check_schema(json.dumps(schema))
        return
    *names, keyword = refusal(json.dumps(schema)).path.split("/")[1:]
    at = schema
    for name in names:
        at = at[int(name)] if isinstance(at, list) else at[name]
    assert keyword in at
    assert any(at is one for one in endless)
