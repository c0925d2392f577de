"""Completes schemas for the compiler: the types that keywords imply, items, optional groups.

By the standard, a keyword without `type` constrains values of its own type and allows all others.
Answers here have the constrained type only: they are valid, and what the author expects.
"""

import re
from collections.abc import Mapping
from typing import Any

from services.engine.grammar.schema_normal import OF_TYPE

ANNOTATIONS = frozenset(
    {
        *("$schema", "$id", "$comment", "title", "description", "default", "examples"),
        *("deprecated", "readOnly", "writeOnly", "format", "contentEncoding", "contentMediaType"),
        *("$defs", "definitions"),
    }
)
_RANGE = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
BY_TYPE: Mapping[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern"}),
    "integer": _RANGE,
    "number": _RANGE,
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "boolean": frozenset(),
    "null": frozenset(),
}
APPLICATORS = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")
_IMPLYING = ("object", "array", "string", "number")
_MAPS = ("properties", "$defs", "definitions")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_SINGLES = ("items", "additionalProperties")

_OPTIONAL_GROUP = re.compile(r"\\.|\[(?:\\.|[^]\\])*\]|\)\?", re.DOTALL)


def implied_types(schema: Mapping[str, Any]) -> list[str]:
    """The types of the keywords in a schema without `type`."""
    return [name for name in _IMPLYING if OF_TYPE[name] & schema.keys()]


def compiler_schema(schema: Any) -> Any:
    """A checked schema with its implied types and items written out."""
    if isinstance(schema, list):
        return [compiler_schema(member) for member in schema]
    if not isinstance(schema, dict):
        return schema
    full = _with_plain_pattern(schema)
    for key in _MAPS:
        if isinstance(full.get(key), dict):
            full[key] = {name: compiler_schema(member) for name, member in full[key].items()}
    for key in (*_LISTS, *_SINGLES):
        if key in full:
            full[key] = compiler_schema(full[key])
    if any(key in full for key in APPLICATORS):
        return full
    types = implied_types(full)
    if "type" not in full and types:
        full["type"] = types if len(types) > 1 else types[0]
    if {"minItems", "maxItems"} & full.keys():
        full.setdefault("items", True)
    return full


def _with_plain_pattern(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with `(…){0,1}` for `(…)?` in its pattern.

    Of an optional group with a repeat in it, xgrammar also allows the repeat alone.
    """
    if not isinstance(schema.get("pattern"), str):
        return dict(schema)

    def plain(found: re.Match[str]) -> str:
        return "){0,1}" if found[0] == ")?" else found[0]

    return {**schema, "pattern": _OPTIONAL_GROUP.sub(plain, schema["pattern"])}
