"""Combines tool_choice, response format and reasoning into one constraint on the output.

The result is a structural tag. The place of each schema in it is recorded, so that an error of the
engine can name the tool or the field that the caller wrote.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from inferfleet_proto.v1 import inference_pb2
from services.common.errors import InvalidArgumentError
from services.gateway.answers.call_format import (
    ANY_OBJECT,
    CallFormat,
    Format,
    either,
    sequence,
    text,
)
from services.gateway.answers.profile import ChatProfile
from services.gateway.answers.reasoning import ReasoningStart
from services.gateway.answers.tools import ToolUse

Owners = Mapping[str, str]
"""JSON pointer of a part of the tag → the caller's field that the part comes from."""


@dataclass(frozen=True)
class OutputConstraint:
    """The constraint for the engine; None if the output is free."""

    constraint: inference_pb2.Constraint | None
    owners: Owners = field(default_factory=dict)


def constrain(
    profile: ChatProfile, use: ToolUse, own: inference_pb2.Constraint | None, start: ReasoningStart
) -> OutputConstraint:
    """Combine the constraints of one request. Reasoning itself is never constrained.

    Args:
        own: the caller's constraint on the answer.
        start: what the prompt decides about reasoning.

    Raises:
        InvalidArgumentError: two constraints exclude each other.
    """
    if use.required and own is not None:
        _refuse("constraint", "cannot be combined with a tool_choice that requires a call")
    if use.parsed and profile.tools == "deepseek_v4" and (use.required or own is not None):
        _refuse("chat.tool_choice", "tool calls of this model cannot be enforced; use auto")
    calls = CallFormat(profile, use)
    parts = []
    if use.parsed:
        enforce = use.required or own is not None
        part = calls.required_calls() if enforce else calls.optional_calls()
        parts += [part] if part is not None else []
    if not parts and (own is None or start == ReasoningStart.CLOSED):
        return OutputConstraint(own)
    named = [(part, f"chat.tools[{index}].parameters") for part, index in calls.schemas]
    if own is not None:
        base, name = _own_format(own)
        parts.append(base)
        named.append((base, name))
    return _tagged(_after_reasoning(profile, calls, either(parts), start), named)


def _after_reasoning(
    profile: ChatProfile, calls: CallFormat, whole: Format, start: ReasoningStart
) -> Format:
    """The format after optional reasoning."""
    marks = profile.marks
    if start == ReasoningStart.CLOSED or marks is None:
        return whole
    end = calls.mark(marks.end)
    inside: Format = {
        "type": "tag",
        "begin": "",
        "content": {"type": "any_text"},
        "end": end["value"] if end["type"] == "const_string" else end,
    }
    space: Format = {"type": "regex", "pattern": r"[ \n]{0,4}"}
    if start == ReasoningStart.OPEN:
        return sequence(inside, space, whole)
    if whole["type"].endswith("triggered_tags"):
        return whole  # its free text holds the reasoning
    return either([sequence(calls.mark(marks.begin), inside, space, whole), whole])


def _own_format(own: inference_pb2.Constraint) -> tuple[Format, str]:
    """The caller's constraint as a part of a structural tag, and the name of its field."""
    kind = str(own.WhichOneof("kind"))
    name = f"constraint.{kind}"
    if kind == "json_object":
        return {"type": "json_schema", "json_schema": ANY_OBJECT}, name
    if kind == "choice":
        return either([text(choice) for choice in own.choice.texts]), name
    if kind == "regex":
        return {"type": "regex", "pattern": own.regex}, name
    if kind == "ebnf":
        return {"type": "grammar", "grammar": own.ebnf}, name
    try:
        inner = json.loads(getattr(own, kind))
    except (ValueError, RecursionError) as error:
        _refuse(name, f"must be JSON: {error}")
    if kind == "json_schema":
        return {"type": "json_schema", "json_schema": inner}, name
    if not isinstance(inner, dict) or not isinstance(inner.get("format"), dict):
        _refuse(name, "must have a format object when combined with tools or reasoning")
    return dict(inner["format"]), name


def _tagged(whole: Format, named: Sequence[tuple[Format, str]]) -> OutputConstraint:
    tag = {"type": "structural_tag", "format": whole}
    constraint = inference_pb2.Constraint(structural_tag=json.dumps(tag, ensure_ascii=False))
    return OutputConstraint(constraint, dict(_owners(tag, "", named)))


def _owners(node: Any, path: str, parts: Sequence[tuple[Format, str]]) -> Iterator[tuple[str, str]]:
    """The pointer of each part; a part can occur twice, with and without reasoning."""
    for part, name in parts:
        if node is part:
            yield f"{path}/json_schema" if part["type"] == "json_schema" else path, name
            return
    members = node.items() if isinstance(node, dict) else enumerate(node)
    for key, member in members:
        if isinstance(member, dict | list):
            yield from _owners(member, f"{path}/{key}", parts)


def name_callers_field(error: InvalidArgumentError, owners: Owners) -> InvalidArgumentError:
    """Turn the engine's error about the structural tag into one about the caller's field."""
    name = "constraint.structural_tag"
    if not error.violations or error.violations[0].field != name or not owners:
        return error
    problem = error.message.removeprefix(f"{name}:").strip()
    found = [pointer for pointer in owners if problem.startswith(pointer)]
    if found:
        pointer = max(found, key=len)
        owner, problem = owners[pointer], problem.removeprefix(pointer)
    else:
        owner = min(owners.values())
    return InvalidArgumentError.for_field(owner, problem, reason=error.reason)


def _refuse(name: str, problem: str) -> NoReturn:
    raise InvalidArgumentError.for_field(name, problem)
