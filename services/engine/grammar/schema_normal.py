"""Brings a schema into one dialect: 2020-12, only keywords that constrain, references by name.

Annotations, unknown keywords and keywords that constrain nothing are dropped. The forms of drafts
4 to 7 are rewritten. Every path in a message is a path in the caller's schema.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.engine.grammar.schema_refs import Place, Resources
from services.engine.grammar.schema_refused import SchemaRefusedError
from services.engine.grammar.schema_values import check_values

MAX_DEPTH = 48
MAX_NODES = 4000

OF_TYPE: Mapping[str, frozenset[str]] = {
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset(
        {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
    ),
    "object": frozenset(
        {
            *("properties", "patternProperties", "additionalProperties", "propertyNames"),
            *("required", "minProperties", "maxProperties", "unevaluatedProperties"),
            *("dependentRequired", "dependentSchemas", "dependencies"),
        }
    ),
    "array": frozenset(
        {
            *("items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"),
            *("contains", "minContains", "maxContains", "unevaluatedItems"),
        }
    ),
}
"""By type: the keywords that constrain values of it only."""
_MAPS = ("properties", "patternProperties", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLES = (
    *("not", "if", "then", "else", "contains", "propertyNames", "additionalProperties", "items"),
    *("unevaluatedProperties", "unevaluatedItems"),
)
_VALUES = (
    *("type", "enum", "const", "required", "minProperties", "maxProperties", "minItems"),
    *("maxItems", "uniqueItems", "minContains", "maxContains", "minLength", "maxLength"),
    *("pattern", "format", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    *("multipleOf", "dependentRequired", "$dynamicRef", "$recursiveRef"),
)
_ZERO = ("minProperties", "minItems", "minLength")
_EMPTY = ("patternProperties", "dependentRequired", "dependentSchemas", "allOf")
_NO_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "not": (False,),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    "propertyNames": (True, {}),
}


@dataclass(frozen=True, slots=True)
class Normal:
    """A normalized schema. `$ref` holds a name of `definitions`, or `#` for the root."""

    root: Any
    definitions: dict[str, Any] = field(default_factory=dict)
    origins: dict[int, str] = field(default_factory=dict)
    """By identity of a node: its path in the caller's schema."""

    def resolve(self, node: Any) -> Any:
        """The node behind a chain of bare references; the node itself if it is none."""
        for _ in range(MAX_DEPTH):
            if not (isinstance(node, dict) and node.keys() == {"$ref"}):
                return node
            node = self.root if node["$ref"] == "#" else self.definitions[node["$ref"]]
        return node


def normalize(schema: Any) -> Normal:
    """Normalize a parsed schema.

    Raises:
        SchemaRefusedError: the schema is malformed, too large, or refers to nothing.
    """
    return _Normalizer(schema).run()


class _Normalizer:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._resources = Resources(root)
        self._nodes = 0
        self._count = 0
        self._names: dict[int, str] = {}
        self._todo: list[tuple[str, Place]] = []
        self._origins: dict[int, str] = {}

    def run(self) -> Normal:
        if isinstance(self._root, dict):
            for group in ("$defs", "definitions"):
                if not isinstance(self._root.get(group, {}), dict):
                    raise SchemaRefusedError(f"/{group}", "must be an object")
        root = self._node(self._root, "", "", 0)
        definitions = {}
        while self._todo:
            name, place = self._todo.pop()
            definitions[name] = self._node(place.node, place.path, place.base, 0)
        return Normal(root, definitions, self._origins)

    def _node(self, schema: Any, path: str, base: str, depth: int) -> Any:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise SchemaRefusedError(path, f"more than {MAX_NODES} subschemas")
        if depth > MAX_DEPTH:
            raise SchemaRefusedError(path, f"nested deeper than {MAX_DEPTH}")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise SchemaRefusedError(path, "must be an object, true or false")
        base = self._resources.base_of(schema, base)
        source = _of_its_types(_in_2020(schema, path))
        sent = _older_names(schema)
        out: dict[str, Any] = {key: source[key] for key in _VALUES if key in source}
        check_values(out, path)
        if "$ref" in source:
            out.update(self._reference(source["$ref"], path, base))
        self._members(source, out, sent, Place(source, path, base), depth)
        _drop_without_effect(out)
        self._origins[id(out)] = path
        return out

    def _members(
        self,
        source: dict[str, Any],
        out: dict[str, Any],
        sent: Mapping[str, str],
        place: Place,
        depth: int,
    ) -> None:
        for key in (*_MAPS, *_LISTS, *_SINGLES):
            if key not in source:
                continue
            value, path = source[key], f"{place.path}/{sent.get(key, key)}"
            if key in _SINGLES:
                out[key] = self._node(value, path, place.base, depth + 1)
                continue
            kind, named = (dict, "an object") if key in _MAPS else (list, "a list of schemas")
            if not isinstance(value, kind):
                raise SchemaRefusedError(path, f"must be {named}")
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            members = {
                name: self._node(member, f"{path}/{name}", place.base, depth + 1)
                for name, member in pairs
            }
            out[key] = members if key in _MAPS else list(members.values())
            if not members and key in _LISTS and key != "allOf":
                raise SchemaRefusedError(path, "must be a list with at least one schema")

    def _reference(self, target: Any, path: str, base: str) -> dict[str, Any]:
        place = self._resources.find(target, base, path)
        if place.node is self._root:
            return {"$ref": "#"}
        name = self._names.get(id(place.node))
        if name is None:
            self._count += 1
            name = f"d{self._count}"
            if isinstance(place.node, dict):
                self._names[id(place.node)] = name
            self._todo.append((name, place))
        return {"$ref": name}


def _in_2020(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """Rewrite the forms of drafts 4 to 7."""
    out = dict(schema)
    for bound, strict in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
        if isinstance(out.get(strict), bool) and out.pop(strict) and bound in out:
            out[strict] = out.pop(bound)
    _merge_bounds(out)
    if isinstance(out.get("items"), list):
        out["prefixItems"] = out.pop("items")
        if "additionalItems" in out:
            out["items"] = out.pop("additionalItems")
        if not out["prefixItems"]:
            del out["prefixItems"]
    dependencies = out.pop("dependencies", {})
    if not isinstance(dependencies, dict):
        raise SchemaRefusedError(f"{path}/dependencies", "must be an object")
    for name, needed in dependencies.items():
        if isinstance(needed, str):  # draft 3
            needed = [needed]
        group = "dependentRequired" if isinstance(needed, list) else "dependentSchemas"
        if not isinstance(out.get(group, {}), dict):
            raise SchemaRefusedError(f"{path}/{group}", "must be an object")
        out[group] = {**out.get(group, {}), name: needed}
    return out


def _older_names(schema: dict[str, Any]) -> Mapping[str, str]:
    """By keyword of 2020-12: the older keyword that was sent."""
    names = {"dependentSchemas": "dependencies"} if "dependencies" in schema else {}
    if isinstance(schema.get("items"), list):
        names |= {"prefixItems": "items", "items": "additionalItems"}
    return names


def _merge_bounds(out: dict[str, Any]) -> None:
    """Keep the tighter one of an inclusive and an exclusive bound."""
    for bound, strict, sign in (
        ("minimum", "exclusiveMinimum", 1),
        ("maximum", "exclusiveMaximum", -1),
    ):
        both: list[Any] = [out.get(bound), out.get(strict)]
        if all(isinstance(one, int | float) for one in both):
            del out[bound if both[1] * sign >= both[0] * sign else strict]


def _of_its_types(schema: dict[str, Any]) -> dict[str, Any]:
    """Drop keywords that constrain only types that the schema excludes."""
    declared = schema.get("type")
    types = declared if isinstance(declared, list) else [declared]
    if declared is None or not all(isinstance(name, str) for name in types):
        return schema
    wanted = {"number" if name == "integer" else name for name in types}
    foreign = frozenset().union(*(keys for name, keys in OF_TYPE.items() if name not in wanted))
    return {key: value for key, value in schema.items() if key not in foreign}


def _drop_without_effect(out: dict[str, Any]) -> None:
    for key in _ZERO:
        if key in out and out[key] == 0 and not isinstance(out[key], bool):
            del out[key]
    for key in _EMPTY:
        if key in out and not out[key]:
            del out[key]
    for key, values in _NO_EFFECT.items():
        if key in out and any(out[key] is value or out[key] == {} == value for value in values):
            del out[key]
    _drop_alone(out)


def _drop_alone(out: dict[str, Any]) -> None:
    """Drop keywords that mean nothing beside, or without, the others."""
    if out.get("properties") and out.get("additionalProperties") in (True, {}):
        del out["additionalProperties"]
    if "if" not in out or not ("then" in out or "else" in out):
        for key in ("if", "then", "else"):
            out.pop(key, None)
    if "contains" not in out:
        for key in ("minContains", "maxContains"):
            out.pop(key, None)
