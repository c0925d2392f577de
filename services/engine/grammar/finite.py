"""Finite answers only: numbers that a double holds, values that need not hold themselves.

The grammar may enter any schema that it reaches, an optional one too, and cannot leave one that no
finite value satisfies. So each of them must have such a value.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from services.engine.grammar.schema_form import APPLICATORS, implied_types

_Trail = tuple[Any, str] | None
"""The parent's trail and a name. Joined for the one that is told of: names may be long."""
_TELLING = ("required", "minItems", "anyOf", "oneOf", "allOf", "$ref")
"""Keywords that can keep a value from ending, the one to tell of first."""


class _Way(NamedTuple):
    keyword: _Trail
    needs: list[Any]


class _Schema(NamedTuple):
    ways: list[_Way]
    """A value is complete once all that one of them needs is."""
    inside: list[tuple[Any, _Trail]]


def infinite_number(parsed: Any) -> str | None:
    """The JSON pointer of a number beyond a double (1e400, NaN); None if there is none."""
    todo: list[tuple[Any, _Trail]] = [(parsed, None)]
    while todo:
        value, trail = todo.pop()
        if isinstance(value, dict):
            todo += [(member, (trail, name)) for name, member in value.items()]
        elif isinstance(value, list):
            todo += [(member, (trail, str(index))) for index, member in enumerate(value)]
        elif isinstance(value, int | float) and not abs(value) <= sys.float_info.max:
            return _pointer(trail)
    return None


def endless_keyword(root: Any, resolve: Callable[[Any, str], Any]) -> str | None:
    """The JSON pointer of a keyword that keeps every value from ending; None if there is none.

    Args:
        root: a schema whose keywords have been checked.
        resolve: the schema that a `$ref` names, given it and the path where it stands.
    """
    found = _reached(root, resolve)
    ended = _ended(found)
    at = next((key for key in found if key not in ended), None)
    if at is None:
        return None
    steps: dict[int, _Trail] = {}
    while at not in steps:  # each that never ends needs another one: this runs into a circle
        way = found[at].ways[0]
        steps[at] = way.keyword
        at = next(id(need) for need in way.needs if id(need) not in ended)
    circle = [trail for trail in list(steps.values())[list(steps).index(at) :] if trail]
    return _pointer(min(circle, key=lambda trail: _TELLING.index(trail[1])))


def _reached(root: Any, resolve: Callable[[Any, str], Any]) -> Mapping[int, _Schema]:
    """By the identity of a schema; a loop, since a chain of definitions may be long."""
    found: dict[int, _Schema] = {}
    todo: list[tuple[Any, _Trail]] = [(root, None)]
    while todo:
        schema, trail = todo.pop()
        if id(schema) not in found:
            found[id(schema)] = seen = _read(schema, trail, resolve)
            todo += reversed(seen.inside)
    return found


def _ended(found: Mapping[int, _Schema]) -> set[int]:
    """Those with a finite value: the least set that holds whatever needs only members of it."""
    ended: set[int] = set()
    users: dict[int, list[tuple[int, set[int]]]] = defaultdict(list)
    todo = []
    for key, schema in found.items():
        for way in schema.ways:
            missing = {id(need) for need in way.needs}
            for need in missing:
                users[need].append((key, missing))
            if not missing:
                todo.append(key)
    while todo:
        done = todo.pop()
        if done in ended:
            continue
        ended.add(done)
        for key, missing in users[done]:
            missing.discard(done)
            if not missing:
                todo.append(key)
    return ended


def _read(schema: Any, trail: _Trail, resolve: Callable[[Any, str], Any]) -> _Schema:
    if not isinstance(schema, dict):
        return _Schema([_Way(trail, [])], [])
    name = next((key for key in APPLICATORS if key in schema), None)
    if name is None:
        return _typed(schema, trail)
    if name in ("enum", "const"):
        return _Schema([_Way(trail, [])], [])
    keyword = (trail, name)
    if name == "$ref":
        target = resolve(schema[name], "")
        place = schema[name].removeprefix("#").removeprefix("/")
        return _Schema([_Way(keyword, [target])], [(target, (None, place) if place else None)])
    branches = schema[name]
    inside: list[tuple[Any, _Trail]] = [
        (branch, (keyword, str(index))) for index, branch in enumerate(branches)
    ]
    return _Schema([_Way(keyword, [branch]) for branch in branches], inside)


def _typed(schema: dict[str, Any], trail: _Trail) -> _Schema:
    declared = schema["type"] if "type" in schema else implied_types(schema)
    types = {declared} if isinstance(declared, str) else set(declared)
    ways = [_Way(trail, [])] if types - {"object", "array"} or not types else []
    inside: list[tuple[Any, _Trail]] = []
    if "object" in types:
        members = schema.get("properties", {})
        inside += [(members[name], ((trail, "properties"), name)) for name in members]
        needs = [members[name] for name in schema.get("required", [])]
        ways.append(_Way((trail, "required"), needs))
        inside.append((schema.get("additionalProperties"), (trail, "additionalProperties")))
    if "array" in types:
        prefix = schema.get("prefixItems", [])
        inside += [(one, ((trail, "prefixItems"), str(i))) for i, one in enumerate(prefix)]
        items = schema.get("items") if schema.get("maxItems") != 0 else None
        inside.append((items, (trail, "items")))
        ways.append(_Way((trail, "minItems"), [items] if schema.get("minItems") else []))
    return _Schema(ways, inside)


def _pointer(trail: _Trail) -> str:
    names: list[str] = []
    while trail is not None:
        trail, name = trail
        names.append(f"/{name}")
    return "".join(reversed(names))
