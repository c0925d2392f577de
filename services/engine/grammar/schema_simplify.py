"""Rewrites a schema so that a grammar engine can enforce it: exactly, or narrower.

`oneOf`, `not`, `if`, `dependent…`, `contains`, `uniqueItems`, `propertyNames`, `unevaluated…` and
the counts of properties become schemas of other keywords. A result can allow fewer values than the
keyword does; it never allows more. What has no such form is refused by its path.
"""

from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from services.engine.grammar.disjoint import are_disjoint
from services.engine.grammar.exclusive import exclusive_branches
from services.engine.grammar.formats import FORMATS, NARROWER, PATTERNS
from services.engine.grammar.members import (
    count_properties,
    evaluated_nodes,
    evaluated_properties,
    unique_arrays,
)
from services.engine.grammar.pattern_form import without_look_ahead
from services.engine.grammar.schema_negation import Negation
from services.engine.grammar.schema_normal import MAX_NODES, Normal, normalize
from services.engine.grammar.schema_refs import is_index
from services.engine.grammar.schema_refused import SchemaRefusedError

MAX_DEPTH = 64
MAX_DEPENDENCIES = 8
MAX_CONTAINS = 16
MAX_ONE_OF = 64
MAX_PAIRS = 4096
"""Most pairs of oneOf branches to compare, in a whole schema."""
_PLAIN = (
    *("$ref", "type", "enum", "const", "required", "pattern", "minimum", "maximum"),
    *("exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
)
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength")


@dataclass(frozen=True, slots=True)
class Simplified:
    """A schema of enforceable keywords, its definitions in `$defs` of the root."""

    schema: Any
    origins: dict[int, str] = field(default_factory=dict)
    """By identity of a node: its path in the caller's schema."""

    def path_of(self, path: str) -> str:
        """The path in the caller's schema of a path in this one."""
        node, origin, rest = self.schema, "", ""
        for part in path.split("/")[1:]:
            if isinstance(node, dict) and part in node:
                node = node[part]
            elif isinstance(node, list) and is_index(part, len(node)):
                node = node[int(part)]
            else:
                node = None
            rest = f"{rest}/{part}"
            if id(node) in self.origins:
                origin, rest = self.origins[id(node)], ""
        return origin + rest


def simplify(schema: Any) -> Simplified:
    """Rewrite a parsed schema.

    Raises:
        SchemaRefusedError: with the path of a keyword that cannot be enforced.
    """
    return _Simplifier(normalize(schema)).run()


class _Simplifier:
    def __init__(self, normal: Normal) -> None:
        self._normal = normal
        self._negation = Negation(normal)
        self._origins: dict[int, str] = {}
        self._nodes = 0
        self._pairs = 0

    def run(self) -> Simplified:
        root = self._node(self._normal.root, "", 0)
        definitions = {
            name: self._node(member, "", 0) for name, member in self._normal.definitions.items()
        }
        if definitions:
            root = {**root, "$defs": definitions}
            self._origins[id(root)] = ""
        return Simplified(root, self._origins)

    def _node(self, schema: Any, path: str, depth: int) -> Any:
        """Rewrite one node; `path` is that of the keyword that a made node stands for."""
        if not isinstance(schema, bool):
            path = self._normal.origins.get(id(schema), path)
        self._nodes += 1
        if self._nodes > 4 * MAX_NODES or depth > MAX_DEPTH:
            raise SchemaRefusedError(path, "becomes too large when its keywords are rewritten")
        if isinstance(schema, bool):
            return schema
        out: dict[str, Any] = {key: schema[key] for key in _PLAIN if key in schema}
        if "$ref" in out and out["$ref"] != "#":
            out["$ref"] = f"#/$defs/{out['$ref']}"
        out.update(_counts(schema))
        self._copy_members(schema, out, path, depth)
        made = [("pattern", one) for one in _with_patterns(schema, out)]
        made += self._made_of(schema, path)
        parts = [self._node(one, f"{path}/{key}", depth + 1) for key, one in made]
        parts = [part for part in parts if part is not True and part != {}]
        if parts and not out and len(parts) == 1 and isinstance(parts[0], dict):
            out = parts[0]
        elif parts:
            out["allOf"] = [*out.get("allOf", []), *parts]
        self._origins[id(out)] = path
        return out

    def _copy_members(
        self, schema: dict[str, Any], out: dict[str, Any], path: str, depth: int
    ) -> None:
        for key in ("properties", "patternProperties"):
            if key in schema:
                out[key] = {
                    name: self._node(member, f"{path}/{key}/{name}", depth + 1)
                    for name, member in schema[key].items()
                }
        for key in ("prefixItems", "anyOf", "allOf"):
            if key in schema:
                out[key] = [self._node(one, f"{path}/{key}", depth + 1) for one in schema[key]]
        if "allOf" in out:
            out["allOf"] = [one for one in out["allOf"] if one is not True and one != {}]
            if not out["allOf"]:
                del out["allOf"]
        for key in ("items", "additionalProperties"):
            if key in schema:
                out[key] = self._node(schema[key], f"{path}/{key}", depth + 1)

    def _made_of(self, schema: dict[str, Any], path: str) -> list[tuple[str, Any]]:
        """What stands for the keywords that no engine has: keyword and schema, all must hold."""
        made: list[tuple[str, Any]] = []
        for key, make in (
            ("oneOf", self._of_one_of),
            ("not", self._of_not),
            ("if", self._of_if),
            ("dependentRequired", self._of_dependent),
            ("dependentSchemas", self._of_dependent),
            ("contains", self._of_contains),
            ("uniqueItems", self._of_unique),
            ("propertyNames", self._of_names),
            ("unevaluatedProperties", self._of_unevaluated),
            ("unevaluatedItems", self._of_unevaluated_items),
        ):
            if key in schema:
                made += [(key, one) for one in make(schema, key, path)]
        for key in ("minProperties", "maxProperties"):
            if key in schema:
                one = count_properties(schema, key)
                if one == {"type": "object", key: schema[key]}:
                    continue  # the engine has it
                if one is None:
                    raise SchemaRefusedError(f"{path}/{key}", "cannot be enforced here")
                made.append((key, one))
        for key in ("$dynamicRef", "$recursiveRef"):
            if key in schema:
                raise SchemaRefusedError(f"{path}/{key}", "cannot be enforced; use $ref")
        return made

    def _of_one_of(self, schema: dict[str, Any], key: str, path: str) -> list[Any]:
        branches = schema["oneOf"]
        self._pairs += len(branches) * (len(branches) - 1) // 2
        if len(branches) > MAX_ONE_OF or self._pairs > MAX_PAIRS:
            problem = f"has more than {MAX_ONE_OF} branches to compare; use anyOf"
            raise SchemaRefusedError(f"{path}/oneOf", problem)
        found = exclusive_branches(branches, self._normal, self._negation)
        if not found:
            raise SchemaRefusedError(
                f"{path}/oneOf", "branches may overlap; use anyOf, or make them disjoint"
            )
        return [{"anyOf": found}]

    def _of_not(self, schema: dict[str, Any], key: str, path: str) -> list[Any]:
        others = self._negation.of(schema["not"])
        if not others:
            raise SchemaRefusedError(f"{path}/not", "what it excludes cannot be enforced")
        return others if len(others) == 1 else [{"anyOf": others}]

    def _of_if(self, schema: dict[str, Any], key: str, path: str) -> list[Any]:
        then, otherwise = schema.get("then", True), schema.get("else", True)
        branches = [{"allOf": [schema["if"], then]}]
        branches += [{"allOf": [other, otherwise]} for other in self._negation.of(schema["if"])]
        return [{"anyOf": [one for one in branches if False not in one["allOf"]] or [False]}]

    def _of_dependent(self, schema: dict[str, Any], key: str, path: str) -> list[Any]:
        if len(schema[key]) > MAX_DEPENDENCIES:
            problem = f"has more than {MAX_DEPENDENCIES} names"
            raise SchemaRefusedError(f"{path}/{key}", problem)
        made = []
        for name, needed in schema[key].items():
            without = {"type": "object", "properties": {name: False}}
            if key == "dependentRequired":
                both: Any = {"type": "object", "required": list(dict.fromkeys([name, *needed]))}
            else:
                both = {"allOf": [{"type": "object", "required": [name]}, needed]}
            made.append({"anyOf": [without, both]})
        return made

    def _of_contains(self, schema: dict[str, Any], key: str, path: str) -> list[Any]:
        """The first items are those that `contains` asks for."""
        count = int(schema.get("minContains", 1))
        if "maxContains" in schema or "prefixItems" in schema or count > MAX_CONTAINS:
            problem = f"is enforced without prefixItems and maxContains, up to {MAX_CONTAINS} items"
            raise SchemaRefusedError(f"{path}/contains", problem)
        if count == 0:
            return []
        items = schema.get("items", True)
        first = (
            schema["contains"] if items in (True, {}) else {"allOf": [items, schema["contains"]]}
        )
        return [
            {"type": "array", "minItems": count, "prefixItems": [first] * count, "items": items}
        ]

    def _of_unique(self, schema: dict[str, Any], key: str, path: str) -> list[Any]:
        if schema.get("maxItems", 2) <= 1 or _are_apart(schema):
            return []
        found = unique_arrays(schema, self._normal)
        if found is None:
            problem = "cannot be enforced: items must be few listed values, or maxItems 1"
            raise SchemaRefusedError(f"{path}/uniqueItems", problem)
        return [{"anyOf": found}]

    def _of_names(self, schema: dict[str, Any], key: str, path: str) -> list[Any]:
        names = self._normal.resolve(schema["propertyNames"])
        types = names.get("type", "string") if isinstance(names, dict) else "string"
        if names is False or "string" not in ([types] if isinstance(types, str) else types):
            return [{"type": "object", "additionalProperties": False}]
        if names.keys() == {"type"}:
            return []
        if "patternProperties" in schema:
            raise SchemaRefusedError(f"{path}/{key}", "cannot be enforced beside patternProperties")
        known = set(names)
        extra = schema.get("additionalProperties", True)
        if known <= {"enum", "type"} and "enum" in known:
            listed = [name for name in names["enum"] if isinstance(name, str)]
            own = schema.get("properties", {})
            members = {name: own.get(name, extra) for name in listed}
            return [{"type": "object", "properties": members, "additionalProperties": False}]
        own = schema.get("properties", {})
        if known <= {"pattern", "type"} and "pattern" in known and not own:
            patterns = {names["pattern"]: extra}
        elif known <= {"minLength", "maxLength", "type"} and len(known) and not own:
            low, high = int(names.get("minLength", 0)), names.get("maxLength")
            most = "" if high is None else int(high)
            patterns = {f"^[\\s\\S]{{{low},{most}}}$": extra}
        else:
            raise SchemaRefusedError(f"{path}/{key}", "cannot be enforced here")
        return [{"type": "object", "patternProperties": patterns, "additionalProperties": False}]

    def _of_unevaluated(self, schema: dict[str, Any], key: str, path: str) -> list[Any]:
        if schema[key] is not False:
            raise SchemaRefusedError(f"{path}/{key}", "can only be false")
        nodes = evaluated_nodes(schema, self._normal)
        self._nodes += len(nodes)
        return evaluated_properties(nodes)

    def _of_unevaluated_items(self, schema: dict[str, Any], key: str, path: str) -> list[Any]:
        applied = {"$ref", "allOf", "anyOf", "oneOf", "if", "not", "contains", "dependentSchemas"}
        if schema[key] is not False or applied & schema.keys():
            raise SchemaRefusedError(f"{path}/{key}", "can only be false, beside no other schema")
        if "items" in schema:
            return []
        prefix = {"prefixItems": schema["prefixItems"]} if "prefixItems" in schema else {}
        return [{"type": "array", **prefix, "items": False}]


def _counts(schema: dict[str, Any]) -> dict[str, int]:
    """The counts that the engines have, as integers: a schema can write 3.0."""
    counts = {key: int(schema[key]) for key in _COUNTS if key in schema}
    for key in ("minProperties", "maxProperties"):
        if count_properties(schema, key) == {"type": "object", key: schema.get(key)}:
            counts[key] = int(schema[key])
    return counts


def _with_patterns(schema: dict[str, Any], out: dict[str, Any]) -> list[Any]:
    """Put an enforced format and the pattern into `out`; what must hold beside it."""
    patterns = without_look_ahead(out.pop("pattern")) if "pattern" in out else []
    name = schema.get("format")
    if isinstance(name, str):
        if NARROWER.get(name, name) in FORMATS:
            out["format"] = NARROWER.get(name, name)
        patterns += [PATTERNS[name]] if name in PATTERNS else []
    if patterns:
        out["pattern"] = patterns[0]
    kind = {"type": out["type"]} if "type" in out else {}
    return [{**kind, "pattern": pattern} for pattern in patterns[1:]]


def _are_apart(schema: dict[str, Any]) -> bool:
    """Whether no two items can be equal: a tuple of disjoint schemas."""
    prefix = schema.get("prefixItems", [])
    closed = schema.get("items", True) is False or len(prefix) >= schema.get("maxItems", 2**31)
    return closed and all(are_disjoint(a, b) for a, b in combinations(prefix, 2))
