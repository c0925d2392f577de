"""Refuses schemas that have no finite value, and numbers beyond a double.

A grammar can enter every schema that it can reach, optional ones included, and can never leave one
that no finite value satisfies. So every reachable schema must have a finite value.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from services.engine.grammar.schema_form import ANNOTATIONS, APPLICATORS, implied_types

_Trail = tuple[Any, str] | None
"""A path as the parent's path and a name; joined only for a message, because names can be long."""
_REPORT_ORDER = ("required", "minItems", "anyOf", "oneOf", "allOf", "$ref")
"""Keywords that can make every value infinite; the first one of these is reported."""


class _Alternative(NamedTuple):
    keyword: _Trail
    needs: list[Any]


class _Schema(NamedTuple):
    alternatives: list[_Alternative]
    """A value is finite if all schemas that one of these needs have finite values."""
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
    """The JSON pointer of a keyword that makes every value infinite; None if there is none.

    Args:
        root: a schema whose keywords have been checked.
        resolve: returns the schema that a `$ref` names, given the reference and its path.
    """
    found = _reachable(root, resolve)
    finite = _finite_schemas(found)
    at = next((key for key in found if key not in finite), None)
    if at is None:
        return None
    steps: dict[int, _Trail] = {}
    while at not in steps:  # each infinite schema needs another one, so this finds a cycle
        alternative = found[at].alternatives[0]
        steps[at] = alternative.keyword
        at = next(id(need) for need in alternative.needs if id(need) not in finite)
    cycle = [trail for trail in list(steps.values())[list(steps).index(at) :] if trail]
    return _pointer(min(cycle, key=lambda trail: _report_rank(trail[1])))


def _report_rank(name: str) -> int:
    """The rank of a path's last name: a keyword, or whatever holds keywords that all must hold."""
    return _REPORT_ORDER.index(name) if name in _REPORT_ORDER else len(_REPORT_ORDER)


def _reachable(root: Any, resolve: Callable[[Any, str], Any]) -> Mapping[int, _Schema]:
    """All reachable schemas by identity; a loop, because a chain of definitions may be long."""
    found: dict[int, _Schema] = {}
    todo: list[tuple[Any, _Trail]] = [(root, None)]
    while todo:
        schema, trail = todo.pop()
        if id(schema) not in found:
            found[id(schema)] = seen = _read(schema, trail, resolve)
            todo += reversed(seen.inside)
    return found


def _finite_schemas(found: Mapping[int, _Schema]) -> set[int]:
    """The schemas with a finite value: the least set that is closed under their needs."""
    finite: set[int] = set()
    users: dict[int, list[tuple[int, set[int]]]] = defaultdict(list)
    todo = []
    for key, schema in found.items():
        for alternative in schema.alternatives:
            missing = {id(need) for need in alternative.needs}
            for need in missing:
                users[need].append((key, missing))
            if not missing:
                todo.append(key)
    while todo:
        done = todo.pop()
        if done in finite:
            continue
        finite.add(done)
        for key, missing in users[done]:
            missing.discard(done)
            if not missing:
                todo.append(key)
    return finite


def _read(schema: Any, trail: _Trail, resolve: Callable[[Any, str], Any]) -> _Schema:
    if not isinstance(schema, dict):
        return _Schema([_Alternative(trail, [])], [])
    parts = _conjuncts(schema)
    if len(parts) > 1:  # all must hold, so each needs a finite value
        return _Schema([_Alternative(trail, parts)], [(part, trail) for part in parts])
    name = next((key for key in APPLICATORS if key in schema), None)
    if name is None:
        return _typed(schema, trail)
    if name in ("enum", "const"):
        return _Schema([_Alternative(trail, [])], [])
    keyword = (trail, name)
    if name == "$ref":
        target = resolve(schema[name], "")
        place = schema[name].removeprefix("#").removeprefix("/")
        return _Schema(
            [_Alternative(keyword, [target])], [(target, (None, place) if place else None)]
        )
    branches = schema[name]
    inside: list[tuple[Any, _Trail]] = [
        (branch, (keyword, str(index))) for index, branch in enumerate(branches)
    ]
    if name == "allOf":
        return _Schema([_Alternative(keyword, list(branches))], inside)
    return _Schema([_Alternative(keyword, [branch]) for branch in branches], inside)


def _conjuncts(schema: dict[str, Any]) -> list[Any]:
    """The parts of a schema whose applicators stand beside other keywords."""
    used = [key for key in APPLICATORS if key in schema]
    rest = {key: value for key, value in schema.items() if key not in (*APPLICATORS, *ANNOTATIONS)}
    parts = [{key: schema[key]} for key in used]
    return [*parts, rest] if rest else parts


def _typed(schema: dict[str, Any], trail: _Trail) -> _Schema:
    declared = schema["type"] if "type" in schema else implied_types(schema)
    types = {declared} if isinstance(declared, str) else set(declared)
    alternatives = [_Alternative(trail, [])] if types - {"object", "array"} or not types else []
    inside: list[tuple[Any, _Trail]] = []
    if "object" in types:
        members = schema.get("properties", {})
        inside += [(members[name], ((trail, "properties"), name)) for name in members]
        needs = [members[name] for name in schema.get("required", []) if name in members]
        alternatives.append(_Alternative((trail, "required"), needs))
        inside.append((schema.get("additionalProperties"), (trail, "additionalProperties")))
    if "array" in types:
        prefix = schema.get("prefixItems", [])
        inside += [(one, ((trail, "prefixItems"), str(i))) for i, one in enumerate(prefix)]
        items = schema.get("items") if schema.get("maxItems") != 0 else None
        inside.append((items, (trail, "items")))
        low = int(schema.get("minItems", 0))
        needs = [*prefix[:low], *([items] if low > len(prefix) else [])]
        alternatives.append(_Alternative((trail, "minItems"), needs))
    return _Schema(alternatives, inside)


def _pointer(trail: _Trail) -> str:
    names: list[str] = []
    while trail is not None:
        trail, name = trail
        names.append(f"/{name}")
    return "".join(reversed(names))
