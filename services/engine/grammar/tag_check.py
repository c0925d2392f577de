"""Checks structural tags: known formats with known members, and the schemas and patterns inside.

The compiler ignores members that it does not know and relaxes some others. A tag is accepted only
if everything in it is enforced. Its tokens are looked up later, with the tokenizer (`tag_format`).
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from services.engine.grammar.regex_check import MAX_CLASSES, regex_problem
from services.engine.grammar.schema_check import SchemaCheck, parse_json
from services.engine.grammar.schema_refused import SchemaRefusedError
from services.engine.grammar.schema_simplify import Simplified, simplify

MAX_FORMATS = 1000
MAX_TAG_DEPTH = 24
MAX_TAG_WHITESPACE = 8
MAX_TAG_REPEAT = 128
_MAX_INT = 2**31 - 1


def check_tag(text: str) -> Any:
    """Parse and check a structural tag.

    Returns:
        The parsed tag.

    Raises:
        SchemaRefusedError: with the path of the member that cannot be enforced.
    """
    tag = parse_json(text)
    if not isinstance(tag, dict):
        raise SchemaRefusedError("", "must be an object")
    if tag.get("type") != "structural_tag":
        raise SchemaRefusedError("/type", "must be structural_tag")
    _TagCheck().run(tag)
    return tag


class _Member(NamedTuple):
    check: Callable[["_TagCheck", Any, str, int], None]
    required: bool = True


class _TagCheck:
    """Checks one tag; counts formats, so that the check itself is bounded."""

    def __init__(self) -> None:
        self._formats = 0
        self._schemas = SchemaCheck()

    def run(self, tag: dict[str, Any]) -> None:
        if "structures" in tag:
            self._members(tag, _LEGACY_TAG, "", 0)
        else:
            self._members(tag, _TAG, "", 0)

    def format(self, node: Any, path: str, depth: int) -> None:
        self._formats += 1
        if self._formats > MAX_FORMATS:
            raise SchemaRefusedError(path, f"more than {MAX_FORMATS} formats")
        if depth > MAX_TAG_DEPTH:
            raise SchemaRefusedError(path, f"nested deeper than {MAX_TAG_DEPTH}")
        kind = node.get("type") if isinstance(node, dict) else None
        if not isinstance(kind, str) or kind not in _FORMATS:
            raise SchemaRefusedError(f"{path}/type", f"must be one of {', '.join(_FORMATS)}")
        self._members(node, _FORMATS[kind], path, depth)
        _check_together(node, kind, path)

    def formats(self, nodes: Any, path: str, depth: int) -> None:
        for index, node in enumerate(_non_empty_list(nodes, path)):
            self.format(node, f"{path}/{index}", depth + 1)

    def tags(self, nodes: Any, path: str, depth: int) -> None:
        for index, node in enumerate(_non_empty_list(nodes, path)):
            if not isinstance(node, dict) or node.get("type") != "tag":
                raise SchemaRefusedError(f"{path}/{index}/type", "must be tag")
            self.format(node, f"{path}/{index}", depth + 1)

    def structures(self, nodes: Any, path: str, depth: int) -> None:
        for index, node in enumerate(_non_empty_list(nodes, path)):
            if not isinstance(node, dict):
                raise SchemaRefusedError(f"{path}/{index}", "must be an object")
            self._members(node, _STRUCTURE, f"{path}/{index}", depth)

    def schema(self, node: Any, path: str, depth: int) -> None:
        try:
            simplified = simplify(node)
            self._check_simplified(simplified)
        except SchemaRefusedError as error:
            raise SchemaRefusedError(path + error.path, error.problem) from error

    def _check_simplified(self, simplified: Simplified) -> None:
        try:
            self._schemas.run(simplified.schema)
        except SchemaRefusedError as error:
            raise SchemaRefusedError(simplified.path_of(error.path), error.problem) from error

    def pattern(self, node: Any, path: str, depth: int) -> None:
        problem = regex_problem(node)
        if problem is None and not self._schemas.count_classes(node):
            problem = f"more than {MAX_CLASSES} character classes in all patterns together"
        if problem is not None:
            raise SchemaRefusedError(path, problem)

    def _members(
        self, node: dict[str, Any], members: Mapping[str, _Member], path: str, depth: int
    ) -> None:
        for name in node:
            if name != "type" and name not in members:
                raise SchemaRefusedError(f"{path}/{name}", "cannot be enforced here")
        for name, member in members.items():
            if name in node:
                member.check(self, node[name], f"{path}/{name}", depth)
            elif member.required:
                raise SchemaRefusedError(f"{path}/{name}", "is required")


def _check_together(node: dict[str, Any], kind: str, path: str) -> None:
    if kind == "repeat" and node["min"] > node["max"]:
        raise SchemaRefusedError(f"{path}/max", "is below min")
    if kind in ("triggered_tags", "tags_with_separator"):
        _check_begins(node, kind, path)
    if kind == "token_triggered_tags":
        for index, tag in enumerate(node["tags"]):
            if not isinstance(tag["begin"], dict):
                raise SchemaRefusedError(f"{path}/tags/{index}/begin", "must be a token")


def _check_begins(node: dict[str, Any], kind: str, path: str) -> None:
    triggers = node.get("triggers", [])
    for index, tag in enumerate(node["tags"]):
        where = f"{path}/tags/{index}/begin"
        if kind == "tags_with_separator":
            continue
        if not isinstance(tag["begin"], str):
            raise SchemaRefusedError(where, "must be text; use token_triggered_tags for tokens")
        if sum(tag["begin"].startswith(trigger) for trigger in triggers) != 1:
            raise SchemaRefusedError(where, "must begin with exactly one of the triggers")


def _non_empty_list(nodes: Any, path: str) -> list[Any]:
    if not isinstance(nodes, list) or not nodes:
        raise SchemaRefusedError(path, "must be a list with at least one member")
    return nodes


def _text(_: _TagCheck, value: Any, path: str, __: int) -> None:
    if not isinstance(value, str):
        raise SchemaRefusedError(path, "must be text")


def _non_empty_text(_: _TagCheck, value: Any, path: str, __: int) -> None:
    if not isinstance(value, str) or not value:
        raise SchemaRefusedError(path, "must be text of at least one character")


def _texts(walk: _TagCheck, value: Any, path: str, depth: int) -> None:
    for index, text in enumerate(_non_empty_list(value, path)):
        _non_empty_text(walk, text, f"{path}/{index}", depth)


def _excluded(walk: _TagCheck, value: Any, path: str, depth: int) -> None:
    if value != []:
        _texts(walk, value, path, depth)


def _flag(_: _TagCheck, value: Any, path: str, __: int) -> None:
    if not isinstance(value, bool):
        raise SchemaRefusedError(path, "must be true or false")


def _count(most: int) -> Callable[[_TagCheck, Any, str, int], None]:
    def check(_: _TagCheck, value: Any, path: str, __: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise SchemaRefusedError(path, f"must be a whole number from 0 to {most}")

    return check


def _count_or_null(most: int) -> Callable[[_TagCheck, Any, str, int], None]:
    count = _count(most)

    def check(walk: _TagCheck, value: Any, path: str, depth: int) -> None:
        if value is not None:
            count(walk, value, path, depth)

    return check


def _fixed(fixed: Any) -> Callable[[_TagCheck, Any, str, int], None]:
    """Accept one value only: the default, which other servers write out."""

    def check(_: _TagCheck, value: Any, path: str, __: int) -> None:
        if value != fixed or type(value) is not type(fixed):
            raise SchemaRefusedError(path, f"can only be {json.dumps(fixed)}")

    return check


def _token(_: _TagCheck, value: Any, path: str, __: int) -> None:
    is_id = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_INT
    if not (is_id or (isinstance(value, str) and value)):
        raise SchemaRefusedError(path, "must be the name or id of a token")


def _tokens(walk: _TagCheck, value: Any, path: str, depth: int) -> None:
    for index, token in enumerate(_non_empty_list(value, path)):
        _token(walk, token, f"{path}/{index}", depth)


def _begin(walk: _TagCheck, value: Any, path: str, depth: int) -> None:
    if isinstance(value, dict):
        if value.get("type") != "token":
            raise SchemaRefusedError(f"{path}/type", "must be token")
        walk.format(value, path, depth + 1)
    else:
        _text(walk, value, path, depth)


def _end(walk: _TagCheck, value: Any, path: str, depth: int) -> None:
    if isinstance(value, list):
        _texts(walk, value, path, depth)
    else:
        _begin(walk, value, path, depth)


_Walk = _TagCheck
_FORMAT = _Member(lambda walk, node, path, depth: walk.format(node, path, depth + 1))
_FORMATS: Mapping[str, Mapping[str, _Member]] = {
    "const_string": {"value": _Member(_non_empty_text)},
    "any_text": {
        "excludes": _Member(_excluded, required=False),
        "max_tokens": _Member(_count_or_null(_MAX_INT), required=False),
        "max_chars": _Member(_fixed(None), required=False),
    },
    "json_schema": {
        "json_schema": _Member(_Walk.schema),
        "max_whitespace_cnt": _Member(_count_or_null(MAX_TAG_WHITESPACE), required=False),
        "style": _Member(_fixed("json"), required=False),
        "any_order": _Member(_fixed(False), required=False),
        "excludes": _Member(_fixed([]), required=False),
    },
    "regex": {"pattern": _Member(_Walk.pattern)},
    "grammar": {
        "grammar": _Member(_non_empty_text),
        "syntax": _Member(_fixed("ebnf"), required=False),
    },
    "token": {"token": _Member(_token)},
    "sequence": {"elements": _Member(_Walk.formats)},
    "or": {"elements": _Member(_Walk.formats)},
    "optional": {"content": _FORMAT},
    "star": {"content": _FORMAT},
    "plus": {"content": _FORMAT},
    "repeat": {
        "content": _FORMAT,
        "min": _Member(_count(MAX_TAG_REPEAT)),
        "max": _Member(_count(MAX_TAG_REPEAT)),
    },
    "tag": {"begin": _Member(_begin), "content": _FORMAT, "end": _Member(_end)},
    "tags_with_separator": {
        "tags": _Member(_Walk.tags),
        "separator": _Member(_text),
        "at_least_one": _Member(_flag, required=False),
        "stop_after_first": _Member(_flag, required=False),
    },
    "triggered_tags": {
        "triggers": _Member(_texts),
        "tags": _Member(_Walk.tags),
        "at_least_one": _Member(_flag, required=False),
        "stop_after_first": _Member(_flag, required=False),
        "excludes": _Member(_excluded, required=False),
    },
    "token_triggered_tags": {
        "trigger_tokens": _Member(_tokens),
        "tags": _Member(_Walk.tags),
        "exclude_tokens": _Member(_fixed([]), required=False),
        "at_least_one": _Member(_flag, required=False),
        "stop_after_first": _Member(_flag, required=False),
    },
}
_TAG = {"format": _FORMAT}
_LEGACY_TAG = {"structures": _Member(_Walk.structures), "triggers": _Member(_texts)}
_STRUCTURE = {
    "begin": _Member(_non_empty_text),
    "schema": _Member(_Walk.schema),
    "end": _Member(_text),
}
