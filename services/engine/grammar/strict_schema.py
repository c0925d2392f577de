"""Checks a simplified schema for the second engine, llguidance, and writes it for that engine.

The engine ignores or refuses what it does not know. This check names the keyword's path first.
"""

from collections.abc import Mapping
from typing import Any

from services.engine.grammar.finite import endless_keyword
from services.engine.grammar.pattern_form import strict_pattern
from services.engine.grammar.schema_form import implied_types
from services.engine.grammar.schema_refused import SchemaRefusedError

KEYWORDS = frozenset(
    {
        *("$ref", "$defs", "type", "enum", "const", "anyOf", "allOf", "properties"),
        *("patternProperties", "additionalProperties", "required", "minProperties"),
        *("maxProperties", "items", "prefixItems", "minItems", "maxItems", "minLength"),
        *("maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum"),
        *("exclusiveMaximum", "multipleOf"),
    }
)
_NO_TYPE = frozenset({"enum", "const", "$ref", "anyOf", "allOf"})


def strict_schema(schema: Any) -> dict[str, Any]:
    """Check a simplified schema and write it for llguidance.

    Raises:
        SchemaRefusedError: with the path, in the simplified schema, of a keyword.
    """
    written = _written(schema, "")
    root = schema if isinstance(schema, dict) else {}

    def resolve(target: Any, path: str) -> Any:
        return schema if target == "#" else root["$defs"][target.removeprefix("#/$defs/")]

    endless = endless_keyword(schema, resolve)
    if endless is not None:
        raise SchemaRefusedError(
            endless, "no finite value satisfies it: every value must contain another one"
        )
    return written if isinstance(written, dict) else {"allOf": [written]}


def _written(schema: Any, path: str) -> Any:
    if isinstance(schema, bool):
        return schema
    for key in schema:
        if key not in KEYWORDS:
            raise SchemaRefusedError(f"{path}/{key}", "cannot be enforced")
    _check_range(schema, path)
    out = {key: _written_value(key, value, f"{path}/{key}") for key, value in schema.items()}
    if "type" not in out and not _NO_TYPE & out.keys():
        types = implied_types(out)
        if types:
            out["type"] = types if len(types) > 1 else types[0]
    return out


def _written_value(key: str, value: Any, path: str) -> Any:
    if key in ("properties", "patternProperties", "$defs"):
        members = {name: _written(member, f"{path}/{name}") for name, member in value.items()}
        return _patterns(members, path) if key == "patternProperties" else members
    if key in ("prefixItems", "anyOf", "allOf"):
        return [_written(one, f"{path}/{index}") for index, one in enumerate(value)]
    if key in ("items", "additionalProperties"):
        return _written(value, path)
    return _pattern(value, path) if key == "pattern" else value


def _patterns(members: Mapping[str, Any], path: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for pattern, member in members.items():
        written = _pattern(pattern, f"{path}/{pattern}")
        if written in out:
            raise SchemaRefusedError(f"{path}/{pattern}", "is there twice")
        out[written] = member
    return out


def _pattern(pattern: Any, path: str) -> str:
    if not isinstance(pattern, str):
        raise SchemaRefusedError(path, "must be a string")
    try:
        return strict_pattern(pattern)
    except ValueError as error:
        raise SchemaRefusedError(path, str(error)) from error


def _check_range(schema: dict[str, Any], path: str) -> None:
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if low is None or high is None:
        return
    is_open = "exclusiveMinimum" in schema or "exclusiveMaximum" in schema
    if low > high or (low == high and is_open):
        raise SchemaRefusedError(path, "no number is within the bounds")
