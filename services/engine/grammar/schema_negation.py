"""Schemas that exclude one another: what satisfies one of the results does not satisfy the schema.

Every answer is a subset of the complement. Where the complement has no schema, parts of it are
left out: the constraint becomes narrower, never wrong.
"""

from collections.abc import Callable, Mapping
from typing import Any

from services.engine.grammar.disjoint import types_of_value
from services.engine.grammar.schema_normal import Normal
from services.engine.grammar.schema_refused import SchemaRefusedError

MAX_ALTERNATIVES = 48
MAX_NEGATED = 8000
"""Most subschemas and listed values to negate for one constraint, each as often as it is used."""
MAX_LISTED_CHARS = 2000
_TYPES = ("string", "number", "object", "array", "boolean", "null")
_DEPTH = 6


class Negation:
    """Negates subschemas of one constraint; counts them, so that the work is bounded."""

    def __init__(self, normal: Normal) -> None:
        self._normal = normal
        self._count = 0

    def of(self, schema: Any, depth: int = 0) -> list[Any]:
        """Normalized schemas of which each one excludes `schema`; empty if none is known.

        Raises:
            SchemaRefusedError: the constraint has too much to negate.
        """
        schema = self._normal.resolve(schema)
        if isinstance(schema, bool) or depth > _DEPTH:
            return [True] if schema is False else []
        self._count += 1 + len(schema.get("enum", ()))
        if self._count > MAX_NEGATED:
            problem = (
                f"more than {MAX_NEGATED} subschemas and values to exclude in the whole schema"
            )
            raise SchemaRefusedError(self._normal.origins.get(id(schema), ""), problem)
        found: list[Any] = []
        for key in schema:
            if key in _NEGATIONS:
                found += _NEGATIONS[key](schema, self, depth + 1)
        return found[:MAX_ALTERNATIVES]


def complement_pattern(texts: set[str]) -> str | None:
    """A pattern of all texts that are not listed; None if they are too long."""
    if sum(map(len, texts)) > MAX_LISTED_CHARS or max(map(len, texts), default=0) > 100:
        return None
    return f"^(?:{_not_in(texts)})$"


def _not_in(texts: set[str]) -> str:
    heads: dict[str, set[str]] = {}
    for text in texts:
        if text:
            heads.setdefault(text[0], set()).add(text[1:])
    others = "".join(map(_escaped, sorted(heads)))
    parts = [f"[^{others}][\\s\\S]*" if heads else "[\\s\\S]+"]
    parts += [f"{_escaped(head)}(?:{_not_in(rest)})" for head, rest in sorted(heads.items())]
    if "" not in texts:
        parts.append("")
    return "|".join(parts)


def _escaped(character: str) -> str:
    if character.isalnum() or ord(character) > 0xFFFF:
        return character
    return f"\\u{ord(character):04x}"


def _types(schema: dict[str, Any], negation: Negation, depth: int) -> list[Any]:
    declared = schema["type"]
    names = {declared} if isinstance(declared, str) else set(declared)
    if "integer" in names:
        names.add("number")  # a number that is no integer has no schema
    rest = [name for name in _TYPES if name not in names]
    return [{"type": rest}] if rest else []


def _required(schema: dict[str, Any], negation: Negation, depth: int) -> list[Any]:
    names = [name for name in schema["required"] if isinstance(name, str)]
    return [{"type": "object", "properties": {name: False}} for name in names]


def _properties(schema: dict[str, Any], negation: Negation, depth: int) -> list[Any]:
    return [
        {"type": "object", "properties": {name: other}, "required": [name]}
        for name, member in schema["properties"].items()
        for other in negation.of(member, depth)
    ]


def _values(schema: dict[str, Any], negation: Negation, depth: int) -> list[Any]:
    values = schema["enum"] if "enum" in schema else [schema["const"]]
    if not isinstance(values, list):
        return []
    used = set().union(*map(types_of_value, values))
    rest = [name for name in _TYPES if name not in used]
    found: list[Any] = [{"type": rest}] if rest else []
    texts = {value for value in values if isinstance(value, str)}
    pattern = complement_pattern(texts) if texts else None
    if pattern is not None:
        found.append({"type": "string", "pattern": pattern})
    flags = [value for value in values if isinstance(value, bool)]
    if len(set(flags)) == 1:
        found.append({"const": not flags[0]})
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if numbers:
        found.append({"type": "number", "exclusiveMinimum": max(numbers)})
        found.append({"type": "number", "exclusiveMaximum": min(numbers)})
    return found


def _any_of(schema: dict[str, Any], negation: Negation, depth: int) -> list[Any]:
    branches = schema.get("anyOf") or schema["oneOf"]
    others = [negation.of(branch, depth) for branch in branches]
    if not all(others):
        return []
    return [{"allOf": [_one_of(other) for other in others]}]


def _all_of(schema: dict[str, Any], negation: Negation, depth: int) -> list[Any]:
    return [other for branch in schema["allOf"] for other in negation.of(branch, depth)]


def _reference(schema: dict[str, Any], negation: Negation, depth: int) -> list[Any]:
    return negation.of({"$ref": schema["$ref"]}, depth) if len(schema) > 1 else []


def _one_of(schemas: list[Any]) -> Any:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _bound(key: str, other: str, kind: str, step: int) -> Callable[..., list[Any]]:
    """The opposite of a bound: the bound `other`, with `step` added."""

    def negate(schema: dict[str, Any], negation: Negation, depth: int) -> list[Any]:
        value = schema[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            return []
        if step and value + step < 0:
            return []
        return [{"type": kind, other: value + step}]

    return negate


_NEGATIONS: Mapping[str, Callable[[dict[str, Any], Negation, int], list[Any]]] = {
    "$ref": _reference,
    "type": _types,
    "required": _required,
    "properties": _properties,
    "enum": _values,
    "const": _values,
    "anyOf": _any_of,
    "oneOf": _any_of,
    "allOf": _all_of,
    "not": lambda schema, negation, depth: [schema["not"]],
    "minimum": _bound("minimum", "exclusiveMaximum", "number", 0),
    "maximum": _bound("maximum", "exclusiveMinimum", "number", 0),
    "exclusiveMinimum": _bound("exclusiveMinimum", "maximum", "number", 0),
    "exclusiveMaximum": _bound("exclusiveMaximum", "minimum", "number", 0),
    "minLength": _bound("minLength", "maxLength", "string", -1),
    "maxLength": _bound("maxLength", "minLength", "string", 1),
    "minItems": _bound("minItems", "maxItems", "array", -1),
    "maxItems": _bound("maxItems", "minItems", "array", 1),
    "minProperties": _bound("minProperties", "maxProperties", "object", -1),
}
