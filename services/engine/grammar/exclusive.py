"""`oneOf` as `anyOf` over branches that exclude one another."""

from itertools import combinations
from typing import Any

from services.engine.grammar.disjoint import are_disjoint, listed_values
from services.engine.grammar.schema_negation import Negation
from services.engine.grammar.schema_normal import Normal

MAX_NEGATED = 12
"""Most branches of a `oneOf` that are told apart by negation."""


def exclusive_branches(branches: list[Any], normal: Normal, negation: Negation) -> list[Any]:
    """Branches of which every value satisfies exactly one of `branches`; empty if none is known.

    Branches that are known to be disjoint stay as they are. Otherwise a property with listed
    values that differ is required in every branch, or each branch excludes the others.
    """
    resolved = [normal.resolve(branch) for branch in branches]
    overlapping = [
        (i, j)
        for i, j in combinations(range(len(branches)), 2)
        if not are_disjoint(resolved[i], resolved[j])
    ]
    if not overlapping:
        return branches
    name = _distinguishing(resolved)
    if name is not None:
        return [
            {
                **one,
                "type": "object",
                "required": list(dict.fromkeys([*one.get("required", []), name])),
            }
            for one in resolved
        ]
    if len(branches) > MAX_NEGATED:
        return []
    found = [_without_others(i, branches, overlapping, negation) for i in range(len(branches))]
    return [branch for branch in found if branch is not None]


def _distinguishing(branches: list[Any]) -> str | None:
    """A property whose listed values differ in all branches."""
    if not all(isinstance(branch, dict) for branch in branches):
        return None
    members = [branch.get("properties", {}) for branch in branches]
    for name in members[0]:
        listed = [one.get(name) for one in members]
        if any(listed_values(schema) is None for schema in listed):
            continue
        if all(are_disjoint(a, b) for a, b in combinations(listed, 2)):
            return str(name)
    return None


def _without_others(
    index: int, branches: list[Any], overlapping: list[tuple[int, int]], negation: Negation
) -> Any:
    parts: list[Any] = [branches[index]]
    for pair in overlapping:
        if index in pair:
            other = branches[pair[0] if pair[1] == index else pair[1]]
            excluded = negation.of(other)
            if not excluded:
                return None
            parts.append(excluded[0] if len(excluded) == 1 else {"anyOf": excluded})
    return parts[0] if len(parts) == 1 else {"allOf": parts}
