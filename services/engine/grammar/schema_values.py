"""Checks the values of keywords: their types and the order of bounds."""

from typing import Any

from services.engine.grammar.schema_refused import SchemaRefusedError

TYPES = ("string", "integer", "number", "object", "array", "boolean", "null")
MAX_ENUM = 2000
MAX_COUNT = 65_536
_COUNTS = (
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    *("minContains", "maxContains"),
)
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def check_values(schema: dict[str, Any], path: str) -> None:
    """Check the keywords of one schema whose values are no schemas.

    Raises:
        SchemaRefusedError: with the path of a keyword whose value is malformed.
    """
    if "type" in schema:
        _check_types(schema["type"], f"{path}/type")
    if "enum" in schema:
        _check_enum(schema["enum"], f"{path}/enum")
    _check_numbers(schema, path)
    if not isinstance(schema.get("uniqueItems", False), bool):
        raise SchemaRefusedError(f"{path}/uniqueItems", "must be true or false")
    if not isinstance(schema.get("pattern", ""), str):
        raise SchemaRefusedError(f"{path}/pattern", "must be a string")
    _check_names(schema.get("required", []), f"{path}/required")
    dependent = schema.get("dependentRequired", {})
    if not isinstance(dependent, dict):
        raise SchemaRefusedError(f"{path}/dependentRequired", "must be an object")
    for name, names in dependent.items():
        _check_names(names, f"{path}/dependentRequired/{name}")
    for low, high in (("minLength", "maxLength"), ("minItems", "maxItems")):
        if schema.get(low, 0) > schema.get(high, MAX_COUNT):
            raise SchemaRefusedError(f"{path}/{high}", "is below the minimum of the same schema")


def _check_numbers(schema: dict[str, Any], path: str) -> None:
    for key in _NUMBERS:
        value = schema.get(key, 1)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SchemaRefusedError(f"{path}/{key}", "must be a number")
    if schema.get("multipleOf", 1) <= 0:
        raise SchemaRefusedError(f"{path}/multipleOf", "must be more than 0")
    for key in _COUNTS:
        if key in schema:
            _check_count(schema[key], f"{path}/{key}")


def _check_types(declared: Any, path: str) -> None:
    names = declared if isinstance(declared, list) else [declared]
    if not names:
        raise SchemaRefusedError(path, "must name at least one type")
    for name in names:
        if name not in TYPES:
            raise SchemaRefusedError(path, f"{name!r} is not a JSON type")


def _check_enum(values: Any, path: str) -> None:
    if not isinstance(values, list) or not values:
        raise SchemaRefusedError(path, "must be a list with at least one value")
    if len(values) > MAX_ENUM:
        raise SchemaRefusedError(path, f"has more than {MAX_ENUM} values")


def _check_count(value: Any, path: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0 or value % 1:
        raise SchemaRefusedError(path, "must be a whole number, 0 or more")
    if value > MAX_COUNT:
        raise SchemaRefusedError(path, f"must be at most {MAX_COUNT}")


def _check_names(names: Any, path: str) -> None:
    if not isinstance(names, list):
        raise SchemaRefusedError(path, "must be a list")
    for name in names:
        if not isinstance(name, str):
            raise SchemaRefusedError(path, f"{name!r} is not a name")
