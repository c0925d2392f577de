"""Rewrites keywords about all properties or all items of a value."""

from itertools import combinations, permutations
from math import comb, perm
from typing import Any

from services.engine.grammar.disjoint import listed_values
from services.engine.grammar.schema_normal import Normal

MAX_CHOICES = 64


def count_properties(schema: dict[str, Any], key: str) -> Any:
    """A schema for `minProperties` or `maxProperties`; None if there is none.

    A value that repeats an undeclared name has fewer properties than members, so a minimum above 1
    counts declared names only.
    """
    if key not in schema:
        return True
    own, required = schema.get("properties", {}), set(schema.get("required", []))
    members = {name for name, member in own.items() if member is not False}
    optional = [name for name in own if name in members and name not in required]
    is_open = schema.get("additionalProperties") is not False or "patternProperties" in schema
    count = int(schema[key])
    if key == "minProperties":
        return _at_least(count - len(required), optional, is_open)
    places = count - len(required)
    if places < 0:
        return False
    if not optional and is_open:
        return {"type": "object", "maxProperties": count}
    choices = _choices_of(places, optional)
    if not is_open:
        return choices
    known = dict.fromkeys([*own, *required], True)
    closed = {"type": "object", "properties": known, "additionalProperties": False}
    return {"allOf": [closed, choices]}


def _at_least(missing: int, optional: list[str], is_open: bool) -> Any:
    if missing <= 0:
        return True
    if len(optional) < missing:
        return {"type": "object", "minProperties": 1} if is_open and missing == 1 else None
    if comb(len(optional), missing) <= MAX_CHOICES:
        return {
            "anyOf": [
                {"type": "object", "required": list(names)}
                for names in combinations(optional, missing)
            ]
        }
    return {"type": "object", "required": optional[:missing]}


def _choices_of(places: int, optional: list[str]) -> Any:
    if len(optional) <= places:
        return True
    choices = [tuple(optional[:places])]
    if comb(len(optional), places) <= MAX_CHOICES:
        choices = list(combinations(optional, places))
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {name: False for name in optional if name not in chosen},
            }
            for chosen in choices
        ]
    }


def unique_arrays(schema: dict[str, Any], normal: Normal) -> list[Any] | None:
    """Arrays of distinct listed values; None if the items are not listed, or too many."""
    if "prefixItems" in schema:
        return None
    items = normal.resolve(schema.get("items"))
    values = listed_values(items)
    if values is None and isinstance(items, dict) and items.get("type") == "boolean":
        values = [True, False]
    if values is None or len(values) > 12:
        return None
    values = _distinct(values)
    low, high = int(schema.get("minItems", 0)), int(schema.get("maxItems", len(values)))
    sizes = range(low, min(high, len(values)) + 1)
    if sum(perm(len(values), size) for size in sizes) <= MAX_CHOICES:
        chosen = [one for size in sizes for one in permutations(values, size)]
    elif sum(comb(len(values), size) for size in sizes) <= MAX_CHOICES:
        chosen = [one for size in sizes for one in combinations(values, size)]
    else:
        return None
    return [_array_of(one) for one in chosen] or None


def _array_of(values: tuple[Any, ...]) -> Any:
    if not values:
        return {"type": "array", "maxItems": 0}
    fixed = [{"const": value} for value in values]
    return {"type": "array", "prefixItems": fixed, "items": False, "minItems": len(fixed)}


def _distinct(values: list[Any]) -> list[Any]:
    """Without values that equal an earlier one; 1 and true count as equal, which only narrows."""
    return [value for index, value in enumerate(values) if value not in values[:index]]


def evaluated_nodes(schema: dict[str, Any], normal: Normal) -> list[dict[str, Any]]:
    """The schema, and those that hold wherever it holds, in order and each once."""
    seen: dict[int, dict[str, Any]] = {}
    rest: list[Any] = [schema]
    while rest:
        one = rest.pop()
        if not isinstance(one, dict) or id(one) in seen:
            continue
        seen[id(one)] = one
        inner = list(one.get("allOf", []))
        if "$ref" in one:
            inner.append(normal.resolve({"$ref": one["$ref"]}))
        rest += reversed(inner)
    return list(seen.values())


def evaluated_properties(nodes: list[dict[str, Any]]) -> list[Any]:
    """What `unevaluatedProperties: false` of the first node means beside what all of them name."""
    is_open = any("unevaluatedProperties" in one for one in nodes[1:])
    if is_open or any("additionalProperties" in one for one in nodes):
        return []
    names = dict.fromkeys((name for one in nodes for name in one.get("properties", {})), True)
    made: dict[str, Any] = {"type": "object", "properties": names}
    patterns = (name for one in nodes for name in one.get("patternProperties", {}))
    if found := dict.fromkeys(patterns, True):
        made["patternProperties"] = found
    return [{**made, "additionalProperties": False}]
