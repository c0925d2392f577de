"""Calls as a structural tag: written as the model's own parser reads them, so that an enforced call
looks to the model like any other."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from services.common.text import deepseek_marks
from services.gateway.answers import hermes, mistral
from services.gateway.answers.profile import ChatProfile
from services.gateway.answers.tools import Tool, ToolUse

Format = dict[str, Any]
ANY_OBJECT: Format = {"type": "object"}


class _Shape(NamedTuple):
    """What stands before and after a call's arguments, and between calls."""

    before: list[str]
    after: list[str]
    separator: str


class CallFormat:
    """The formats of one request's calls. `schemas` are the parts that hold a tool's schema."""

    def __init__(self, profile: ChatProfile, use: ToolUse) -> None:
        self._profile = profile
        self._use = use
        self._chosen = [tool for tool in use.tools if not use.named or tool.name == use.named]
        self.schemas: list[tuple[Format, int]] = []
        """A part, by identity, and its tool's index."""

    def some(self) -> Format:
        """One call or more."""
        calls = self._several()
        if self._profile.tools == "deepseek_v3":
            return sequence(
                self.mark(deepseek_marks.LIST), calls, self.mark(deepseek_marks.LIST_END)
            )
        if self._profile.tools == "mistral" and self._profile.listed:
            return sequence(self.mark(mistral.BEGIN), text("["), calls, text("]"))
        return calls

    def among_text(self) -> Format | None:
        """Free text in which calls hold to their schemas, where something is demanded of them;
        else None."""
        demands = not self._use.parallel or any(tool.strict for tool in self._use.tools)
        if not demands or self._profile.tools == "deepseek_v4":
            return None
        if self._profile.tools == "llama3":  # no mark tells a call from text: its brace does
            begins: Format = {"type": "regex", "pattern": r"[^\s{]"}
            return either([self.some(), sequence(begins, {"type": "any_text"})])
        if self._profile.tools == "deepseek_v3":
            return self._triggered(deepseek_marks.LIST, [self._several()], deepseek_marks.LIST_END)
        if self._profile.tools == "mistral" and self._profile.listed:
            return self._triggered(mistral.BEGIN, [text("["), self._several()], "]")
        mark = hermes.BEGIN if self._profile.tools == "hermes" else mistral.BEGIN
        tags = [self._tag(tool) for tool in self._chosen]
        return self._dispatch(mark, tags, once=not self._use.parallel)

    def _triggered(self, mark: str, content: Sequence[Format], end: str) -> Format:
        """Text, then perhaps one block of calls, which ends the answer."""
        inside = content[0] if len(content) == 1 else sequence(*content)
        begin, after = _bare(self.mark(mark)), _bare(self.mark(end))
        tag: Format = {"type": "tag", "begin": begin, "content": inside, "end": after}
        return self._dispatch(mark, [tag], once=True)

    def _dispatch(self, mark: str, tags: list[Format], *, once: bool) -> Format:
        among: Format = {"tags": tags, "at_least_one": False, "stop_after_first": once}
        special = self._profile.id_of(mark)
        if special is None:
            return {"type": "triggered_tags", "triggers": [mark], **among}
        return {"type": "token_triggered_tags", "trigger_tokens": [special], **among}

    def _several(self) -> Format:
        return {
            "type": "tags_with_separator",
            "tags": [self._tag(tool) for tool in self._chosen],
            "separator": self._shape("").separator,
            "at_least_one": True,
            "stop_after_first": not self._use.parallel or bool(self._use.named),
        }

    def mark(self, mark: str) -> Format:
        """A mark, as the token that it is where no text can hold it."""
        special = self._profile.id_of(mark)
        return text(mark) if special is None else {"type": "token", "token": special}

    def _tag(self, tool: Tool) -> Format:
        shape = self._shape(tool.name)
        before, after = self._joined(shape.before), self._joined(shape.after)
        arguments = self._arguments(tool)
        middle = [*before[1:], arguments, *after[:-1]]
        return {
            "type": "tag",
            "begin": _bare(before[0]),
            "content": arguments if len(middle) == 1 else sequence(*middle),
            "end": _bare(after[-1]) if after else "",
        }

    def _joined(self, pieces: Sequence[str]) -> list[Format]:
        """Texts and marks as few parts as possible."""
        parts: list[Format] = []
        for piece in pieces:
            part = self.mark(piece)
            if parts and part["type"] == parts[-1]["type"] == "const_string":
                parts[-1] = text(parts[-1]["value"] + piece)
            else:
                parts.append(part)
        return parts

    def _arguments(self, tool: Tool) -> Format:
        enforced = tool.strict is not False if self._use.required else bool(tool.strict)
        schema = dict(tool.schema) if enforced else ANY_OBJECT
        part: Format = {"type": "json_schema", "json_schema": schema}
        self.schemas.append((part, self._use.tools.index(tool)))
        return part

    def _shape(self, name: str) -> _Shape:
        if self._profile.tools == "hermes":
            before = [hermes.BEGIN, f'\n{{"name": "{name}", "arguments": ']
            return _Shape(before, ["}\n", hermes.END], "\n")
        if self._profile.tools == "llama3":
            return _Shape([f'{{"name": "{name}", "parameters": '], ["}"], "; ")
        if self._profile.tools == "deepseek_v3":
            return self._deepseek(name)
        if self._profile.listed:
            return _Shape([f'{{"name": "{name}", "arguments": '], ["}"], ", ")
        return _Shape([mistral.BEGIN, name, mistral.ARGUMENTS], [], "")

    def _deepseek(self, name: str) -> _Shape:
        call, separator, end = (
            deepseek_marks.CALL,
            deepseek_marks.SEPARATOR,
            deepseek_marks.CALL_END,
        )
        if self._profile.fenced:
            before = [call, "function", separator, f"{name}\n```json\n"]
            return _Shape(before, ["\n```", end], "\n")
        return _Shape([call, name, separator], [end], "")


def sequence(*elements: Format) -> Format:
    """One after the other."""
    return {"type": "sequence", "elements": list(elements)}


def either(elements: Sequence[Format]) -> Format:
    """One of them."""
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def text(value: str) -> Format:
    """These very characters."""
    return {"type": "const_string", "value": value}


def _bare(part: Format) -> Any:
    """As `begin` and `end` of a tag have it: a text itself, or a token."""
    return part["value"] if part["type"] == "const_string" else part
