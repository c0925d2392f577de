"""Whether two schemas are disjoint, so that `oneOf` over them means the same as `anyOf`."""

from collections.abc import Hashable
from typing import Any

_ALL_TYPES = frozenset({"string", "integer", "number", "object", "array", "boolean", "null"})


def are_disjoint(left: Any, right: Any) -> bool:
    """True if it is certain that no value satisfies both; False otherwise."""
    if not isinstance(left, dict) or not isinstance(right, dict):
        return False
    left_values, right_values = _values(left), _values(right)
    if left_values is not None and right_values is not None:
        return not {_key(value) for value in left_values} & {_key(value) for value in right_values}
    left_types, right_types = _types(left), _types(right)
    if not left_types & right_types:
        return True
    if not left_types == right_types == {"object"}:
        return False
    return _differ_in_a_property(left, right) or _excludes(left, right) or _excludes(right, left)


def _excludes(closed: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether a name that `other` requires cannot be in `closed`."""
    known = closed.get("properties", {})
    is_closed = closed.get("additionalProperties") is False and not closed.get("patternProperties")
    return any(
        known.get(name) is False or (is_closed and name not in known)
        for name in other.get("required", [])
    )


def listed_values(schema: Any) -> list[Any] | None:
    """The values of `const` or `enum`; None without either."""
    return _values(schema) if isinstance(schema, dict) else None


def _differ_in_a_property(left: dict[str, Any], right: dict[str, Any]) -> bool:
    shared = set(left.get("required", [])) & set(right.get("required", []))
    pairs = [[side.get("properties", {}).get(name) for side in (left, right)] for name in shared]
    return any(_are_listed(a) and _are_listed(b) and are_disjoint(a, b) for a, b in pairs)


def _are_listed(member: Any) -> bool:
    return isinstance(member, dict) and _values(member) is not None


def _values(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _types(schema: dict[str, Any]) -> frozenset[str]:
    values = _values(schema)
    if values is not None:
        return frozenset().union(*(types_of_value(value) for value in values))
    declared = schema.get("type")
    if declared is None:
        return _ALL_TYPES
    types = frozenset(declared if isinstance(declared, list) else [declared])
    return types | {"integer"} if "number" in types else types


def types_of_value(value: Any) -> frozenset[str]:
    """The JSON types of a value; a whole number is an integer and a number."""
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int | float):
        return frozenset({"integer", "number"})
    names = {str: "string", dict: "object", list: "array", type(None): "null"}
    return frozenset({names[type(value)]})


def _key(value: Any) -> Hashable:
    """A key that is equal for equal JSON values: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(value, list):
        return ("list", *map(_key, value))
    if isinstance(value, dict):
        return ("dict", frozenset((name, _key(member)) for name, member in value.items()))
    return (isinstance(value, bool), value)
