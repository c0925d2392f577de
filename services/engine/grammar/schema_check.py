"""Checks JSON schemas for xgrammar: every keyword of an accepted schema holds in the answer.

The grammar compiler silently drops keywords that it cannot express. This check refuses such a
schema first, with the path of the keyword, so that every answer is really valid. Dialect: 2020-12.
Annotations (title, description, default, format, …) constrain nothing and are accepted.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from services.engine.grammar.disjoint import are_disjoint
from services.engine.grammar.finite import endless_keyword, infinite_number
from services.engine.grammar.regex_check import MAX_CLASSES, json_pattern_problem
from services.engine.grammar.schema_form import ANNOTATIONS, APPLICATORS, BY_TYPE, implied_types
from services.engine.grammar.schema_refused import SchemaRefusedError

MAX_SCHEMA_CHARS = 64 * 1024
MAX_DEPTH = 48
MAX_NODES = 4000
MAX_ENUM = 2000
MAX_ALIASES = 48
MAX_ONE_OF = 64
MAX_PAIRS = 4096
"""Most pairs of oneOf branches to compare, in a whole schema."""
MAX_LENGTH_BOUND = 4096


def check_schema(text: str) -> Any:
    """Parse and check a schema.

    Returns:
        The parsed schema.

    Raises:
        SchemaRefusedError: with the keyword's path.
    """
    schema = parse_json(text)
    SchemaCheck().run(schema)
    return schema


def parse_json(text: str) -> Any:
    """Parse JSON; refuse what two parsers can read differently.

    Raises:
        SchemaRefusedError: at the root, or at a number that is not finite.
    """
    if len(text) > MAX_SCHEMA_CHARS:
        raise SchemaRefusedError("", f"longer than {MAX_SCHEMA_CHARS} characters")
    try:
        parsed = json.loads(text, object_pairs_hook=_unique_members)
    except (ValueError, RecursionError) as error:
        raise SchemaRefusedError("", f"not JSON: {error}") from error
    # Python reads 1e400 as infinity and writes it as Infinity, which is not JSON.
    path = infinite_number(parsed)
    if path is not None:
        raise SchemaRefusedError(path, "must be a finite number, within a double's range")
    return parsed


def _unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        # The compiler may use the other one of the two.
        raise ValueError("a name occurs twice in one object")
    return members


class SchemaCheck:
    """Checks the schemas of one constraint; counts nodes, so that the check itself is bounded."""

    def __init__(self) -> None:
        self._root: Any = None
        self._nodes = 0
        self._pairs = 0
        self._classes = 0

    def run(self, root: Any) -> None:
        """Check one parsed schema.

        Raises:
            SchemaRefusedError: with the keyword's path.
        """
        self._root = root
        self._node(root, "", 0)
        for path, schema in self._definitions():
            self._node(schema, path, 0)
        endless = endless_keyword(root, self._resolve)
        if endless is not None:
            raise SchemaRefusedError(
                endless, "no finite value satisfies it: every value must contain another one"
            )

    def count_classes(self, pattern: str) -> bool:
        """Count a pattern's character classes; returns whether all are within the limit."""
        self._classes += pattern.count("[")
        return self._classes <= MAX_CLASSES

    def _definitions(self) -> Iterator[tuple[str, Any]]:
        if not isinstance(self._root, dict):
            return
        for group in ("$defs", "definitions"):
            members = self._root.get(group, {})
            if not isinstance(members, dict):
                raise SchemaRefusedError(f"/{group}", "must be an object")
            for name, schema in members.items():
                yield f"/{group}/{name}", schema

    def _node(self, schema: Any, path: str, depth: int) -> None:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise SchemaRefusedError(path, f"more than {MAX_NODES} subschemas")
        if depth > MAX_DEPTH:
            raise SchemaRefusedError(path, f"nested deeper than {MAX_DEPTH}")
        if schema is True:
            return
        if not isinstance(schema, dict):
            raise SchemaRefusedError(path, "must be an object or true")
        used = [key for key in schema if key not in ANNOTATIONS]
        for key in ("$defs", "definitions", "$id"):
            if path and key in schema:
                raise SchemaRefusedError(f"{path}/{key}", "is supported at the root only")
        applicators = [key for key in APPLICATORS if key in schema]
        if applicators:
            self._applicator(schema, applicators[0], used, path, depth)
        else:
            self._typed(schema, used, path, depth)

    def _applicator(
        self, schema: dict[str, Any], name: str, used: list[str], path: str, depth: int
    ) -> None:
        allowed = {name, "type"} if name in ("enum", "const") else {name}
        for key in used:
            if key not in allowed:
                raise SchemaRefusedError(f"{path}/{key}", f"cannot be enforced beside {name}")
        handlers: Mapping[str, Callable[[dict[str, Any], str, int], None]] = {
            "$ref": self._ref,
            "enum": self._values,
            "const": self._values,
            "anyOf": self._any_of,
            "oneOf": self._one_of,
            "allOf": self._all_of,
        }
        handlers[name](schema, path, depth)

    def _ref(self, schema: dict[str, Any], path: str, depth: int) -> None:
        node: Any = schema
        for _ in range(MAX_ALIASES):
            if not (isinstance(node, dict) and "$ref" in node):
                return
            node = self._resolve(node["$ref"], path)
        problem = f"refers to itself, or to a schema through more than {MAX_ALIASES} others"
        raise SchemaRefusedError(f"{path}/$ref", problem)

    def _resolve(self, target: Any, path: str) -> Any:
        parts = target.split("/") if isinstance(target, str) else []
        if target == "#":
            return self._root
        if len(parts) != 3 or parts[0] != "#" or parts[1] not in ("$defs", "definitions"):
            raise SchemaRefusedError(f"{path}/$ref", "only #, #/$defs/… and #/definitions/… work")
        name = parts[2].replace("~1", "/").replace("~0", "~")
        group = self._root.get(parts[1], {})
        if not isinstance(group, dict):
            raise SchemaRefusedError(f"/{parts[1]}", "must be an object")
        if name not in group:
            raise SchemaRefusedError(f"{path}/$ref", f"{target!r} is not defined")
        return group[name]

    def _values(self, schema: dict[str, Any], path: str, depth: int) -> None:
        key = "enum" if "enum" in schema else "const"
        values = schema["enum"] if key == "enum" else [schema["const"]]
        if not isinstance(values, list) or not values:
            raise SchemaRefusedError(f"{path}/{key}", "must be a list with at least one value")
        if len(values) > MAX_ENUM:
            raise SchemaRefusedError(f"{path}/{key}", f"has more than {MAX_ENUM} values")
        types = self._types(schema, path) if "type" in schema else None
        for value in values:
            if types is not None and not any(_is_a(value, name) for name in types):
                raise SchemaRefusedError(f"{path}/{key}", f"{value!r} is not of the schema's type")

    def _any_of(self, schema: dict[str, Any], path: str, depth: int) -> None:
        self._branches(schema["anyOf"], f"{path}/anyOf", depth)

    def _one_of(self, schema: dict[str, Any], path: str, depth: int) -> None:
        branches = schema["oneOf"]
        self._branches(branches, f"{path}/oneOf", depth)
        self._pairs += len(branches) * (len(branches) - 1) // 2
        if len(branches) > MAX_ONE_OF or self._pairs > MAX_PAIRS:
            problem = f"has more than {MAX_ONE_OF} branches to compare; use anyOf"
            raise SchemaRefusedError(f"{path}/oneOf", problem)
        resolved = [self._resolve_refs(branch, path) for branch in branches]
        for index, left in enumerate(resolved):
            for right in resolved[index + 1 :]:
                if not are_disjoint(left, right):
                    raise SchemaRefusedError(
                        f"{path}/oneOf", "branches may overlap; use anyOf, or make them disjoint"
                    )

    def _all_of(self, schema: dict[str, Any], path: str, depth: int) -> None:
        branches = schema["allOf"]
        if not isinstance(branches, list) or len(branches) != 1:
            raise SchemaRefusedError(f"{path}/allOf", "cannot be enforced with several members")
        self._branches(branches, f"{path}/allOf", depth)

    def _branches(self, branches: Any, path: str, depth: int) -> None:
        if not isinstance(branches, list) or not branches:
            raise SchemaRefusedError(path, "must be a list with at least one schema")
        for index, branch in enumerate(branches):
            self._node(branch, f"{path}/{index}", depth + 1)

    def _resolve_refs(self, schema: Any, path: str) -> Any:
        for _ in range(MAX_DEPTH):
            if not (isinstance(schema, dict) and "$ref" in schema):
                return schema
            schema = self._resolve(schema["$ref"], path)
        return schema

    def _types(self, schema: dict[str, Any], path: str) -> list[str]:
        declared = schema["type"]
        types = declared if isinstance(declared, list) else [declared]
        for name in types:
            if not isinstance(name, str) or name not in BY_TYPE:
                raise SchemaRefusedError(f"{path}/type", f"{name!r} is not a JSON type")
        if not types:
            raise SchemaRefusedError(f"{path}/type", "must name at least one type")
        return types

    def _typed(self, schema: dict[str, Any], used: list[str], path: str, depth: int) -> None:
        types = self._types(schema, path) if "type" in schema else implied_types(schema)
        allowed = frozenset({"type"}).union(*(BY_TYPE[name] for name in types))
        for key in used:
            if key not in allowed:
                raise SchemaRefusedError(f"{path}/{key}", "cannot be enforced")
        if "object" in types:
            self._object(schema, path, depth)
        if "array" in types:
            self._array(schema, path, depth)
        if "string" in types:
            self._string(schema, path)
        for name in ("integer", "number"):
            if name in types:
                _check_range(schema, path, whole=name == "integer" and "number" not in types)

    def _object(self, schema: dict[str, Any], path: str, depth: int) -> None:
        properties = schema.get("properties", {})
        if not isinstance(properties, dict):
            raise SchemaRefusedError(f"{path}/properties", "must be an object")
        for name, member in properties.items():
            self._node(member, f"{path}/properties/{name}", depth + 1)
        required = schema.get("required", [])
        if not isinstance(required, list):
            raise SchemaRefusedError(f"{path}/required", "must be a list")
        for name in required:
            if not isinstance(name, str) or name not in properties:
                raise SchemaRefusedError(f"{path}/required", f"{name!r} is not in properties")
        extra = schema.get("additionalProperties", False)
        if extra is False:
            return
        if properties:
            # An undeclared name could repeat a declared one, with a value of another type.
            raise SchemaRefusedError(
                f"{path}/additionalProperties", "must be false (or absent) beside properties"
            )
        self._node(extra, f"{path}/additionalProperties", depth + 1)

    def _array(self, schema: dict[str, Any], path: str, depth: int) -> None:
        low, high = (_bound(schema, key, path) for key in ("minItems", "maxItems"))
        _check_order(low, high, f"{path}/maxItems")
        bounded = low is not None or high is not None
        prefix = schema.get("prefixItems")
        if prefix is not None:
            self._branches(prefix, f"{path}/prefixItems", depth)
            if bounded or schema.get("items", False) is not False:
                raise SchemaRefusedError(
                    f"{path}/prefixItems", "must stand alone or with items: false"
                )
            return
        if "items" not in schema:
            return
        self._node(schema["items"], f"{path}/items", depth + 1)

    def _string(self, schema: dict[str, Any], path: str) -> None:
        low, high = (_bound(schema, key, path) for key in ("minLength", "maxLength"))
        _check_order(low, high, f"{path}/maxLength")
        if "pattern" not in schema:
            return
        if low is not None or high is not None:
            raise SchemaRefusedError(f"{path}/pattern", "cannot be enforced beside a length")
        pattern = schema["pattern"]
        problem = json_pattern_problem(pattern)
        if problem is None and not self.count_classes(pattern):
            problem = f"more than {MAX_CLASSES} character classes in all patterns together"
        if problem is not None:
            raise SchemaRefusedError(f"{path}/pattern", problem)


def _check_range(schema: dict[str, Any], path: str, *, whole: bool) -> None:
    keys = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
    given = {key: schema[key] for key in keys if key in schema}
    for key, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise SchemaRefusedError(f"{path}/{key}", "must be a number")
    lows = [(given[k], k.startswith("ex")) for k in keys[:2] if k in given]
    highs = [(given[k], k.startswith("ex")) for k in keys[2:] if k in given]
    if len(lows) > 1 or len(highs) > 1:
        raise SchemaRefusedError(path, "give either the inclusive or the exclusive bound")
    if not lows or not highs:
        return
    (low, low_open), (high, high_open) = lows[0], highs[0]
    if whole:
        first = int(low // 1) + (1 if low_open or low != low // 1 else 0)
        last = int(-(-high // 1)) - (1 if high_open or high != -(-high // 1) else 0)
        empty = first > last
    else:
        empty = low > high or (low == high and (low_open or high_open))
    if empty:
        raise SchemaRefusedError(path, "no number is within the bounds")


def _bound(schema: dict[str, Any], key: str, path: str) -> int | None:
    if key not in schema:
        return None
    value = schema[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise SchemaRefusedError(f"{path}/{key}", "must be a whole number, 0 or more")
    if value > MAX_LENGTH_BOUND:
        raise SchemaRefusedError(f"{path}/{key}", f"must be at most {MAX_LENGTH_BOUND}")
    return value


def _check_order(low: int | None, high: int | None, path: str) -> None:
    if low is not None and high is not None and low > high:
        raise SchemaRefusedError(path, "is below the minimum of the same schema")


def _is_a(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    kinds: Mapping[str, Any] = {
        "string": str,
        "integer": int,
        "number": (int, float),
        "object": dict,
        "array": list,
        "null": type(None),
        "boolean": bool,
    }
    return isinstance(value, kinds[name])
