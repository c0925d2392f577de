"""Rewrites keywords about all properties or all items of a value."""

from itertools import combinations, permutations
from math import comb
from typing import Any

from services.engine.grammar.disjoint import listed_values
from services.engine.grammar.schema_normal import Normal

MAX_CHOICES = 64
_DEPTH = 8


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
    if sum(_orders(len(values), size) for size in sizes) <= MAX_CHOICES:
        chosen = [one for size in sizes for one in permutations(values, size)]
    elif sum(comb(len(values), size) for size in sizes) <= MAX_CHOICES:
        chosen = [one for size in sizes for one in combinations(values, size)]
    else:
        return None
    return [_array_of(one) for one in chosen] or None


def _orders(count: int, size: int) -> int:
    total = 1
    for factor in range(count - size + 1, count + 1):
        total *= factor
    return total


def _array_of(values: tuple[Any, ...]) -> Any:
    if not values:
        return {"type": "array", "maxItems": 0}
    fixed = [{"const": value} for value in values]
    return {"type": "array", "prefixItems": fixed, "items": False, "minItems": len(fixed)}


def _distinct(values: list[Any]) -> list[Any]:
    """Without values that equal an earlier one; 1 and true count as equal, which only narrows."""
    return [value for index, value in enumerate(values) if value not in values[:index]]


def evaluated_properties(schema: dict[str, Any], normal: Normal) -> list[Any]:
    """What `unevaluatedProperties: false` means beside the names that always are evaluated."""
    names, patterns, is_open = _evaluated(schema, normal, 0)
    if is_open:
        return []
    made: dict[str, Any] = {"type": "object", "properties": dict.fromkeys(names, True)}
    if patterns:
        made["patternProperties"] = dict.fromkeys(patterns, True)
    return [{**made, "additionalProperties": False}]


def _evaluated(schema: Any, normal: Normal, depth: int) -> tuple[list[str], list[str], bool]:
    """Declared names, patterns, and whether all names are evaluated, whatever the value is."""
    if not isinstance(schema, dict) or depth > _DEPTH:
        return [], [], False
    names = list(schema.get("properties", {}))
    patterns = list(schema.get("patternProperties", {}))
    is_open = "additionalProperties" in schema or (depth > 0 and "unevaluatedProperties" in schema)
    inner = list(schema.get("allOf", []))
    if "$ref" in schema:
        inner.append(normal.resolve({"$ref": schema["$ref"]}))
    for one in inner:
        more_names, more_patterns, more_open = _evaluated(one, normal, depth + 1)
        names += more_names
        patterns += more_patterns
        is_open = is_open or more_open
    return names, patterns, is_open
