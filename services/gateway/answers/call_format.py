"""Builds the structural tag of tool calls, in the syntax that the model itself writes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from services.common.text import deepseek_marks
from services.gateway.answers import hermes, mistral
from services.gateway.answers.profile import ChatProfile
from services.gateway.answers.tools import Tool, ToolUse

Format = dict[str, Any]
ANY_OBJECT: Format = {"type": "object"}


class _Syntax(NamedTuple):
    """The pieces around a call's arguments, and the separator between calls."""

    before: list[str]
    after: list[str]
    separator: str


class CallFormat:
    """The formats of one request's calls."""

    def __init__(self, profile: ChatProfile, use: ToolUse) -> None:
        self._profile = profile
        self._use = use
        self._chosen = [tool for tool in use.tools if use.named in (None, tool.name)]
        self.schemas: list[tuple[Format, int]] = []
        """Parts that hold a tool's schema, with the tool's index; a part is found by identity."""

    def required_calls(self) -> Format:
        """One or more calls and nothing else."""
        calls = self._call_list()
        if self._profile.tools == "deepseek_v3":
            return sequence(
                self.mark(deepseek_marks.LIST), calls, self.mark(deepseek_marks.LIST_END)
            )
        if self._profile.tools == "mistral" and self._profile.listed:
            return sequence(self.mark(mistral.BEGIN), text("["), calls, text("]"))
        return calls

    def optional_calls(self) -> Format | None:
        """Free text in which calls keep to their schemas; None if nothing is to be enforced."""
        enforced = not self._use.parallel or any(tool.strict for tool in self._use.tools)
        if not enforced or self._profile.tools == "deepseek_v4":
            return None
        if self._profile.tools == "llama3":  # a call has no mark: it begins with its brace
            begins: Format = {"type": "regex", "pattern": r"[^\s{]"}
            return either([self.required_calls(), sequence(begins, {"type": "any_text"})])
        if self._profile.tools == "deepseek_v3":
            return self._triggered(
                deepseek_marks.LIST, [self._call_list()], deepseek_marks.LIST_END
            )
        if self._profile.tools == "mistral" and self._profile.listed:
            return self._triggered(mistral.BEGIN, [text("["), self._call_list()], "]")
        mark = hermes.BEGIN if self._profile.tools == "hermes" else mistral.BEGIN
        tags = [self._tag(tool) for tool in self._chosen]
        return self._dispatch(mark, tags, once=not self._use.parallel)

    def _triggered(self, mark: str, content: Sequence[Format], end: str) -> Format:
        """Text, then optionally one block of calls, which ends the answer."""
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

    def _call_list(self) -> Format:
        return {
            "type": "tags_with_separator",
            "tags": [self._tag(tool) for tool in self._chosen],
            "separator": self._syntax("").separator,
            "at_least_one": True,
            "stop_after_first": not self._use.parallel or self._use.named is not None,
        }

    def mark(self, mark: str) -> Format:
        """A mark: as a token if the model has a special token for it, else as text."""
        special = self._profile.id_of(mark)
        return text(mark) if special is None else {"type": "token", "token": special}

    def _tag(self, tool: Tool) -> Format:
        syntax = self._syntax(tool.name)
        before, after = self._as_parts(syntax.before), self._as_parts(syntax.after)
        arguments = self._arguments(tool)
        middle = [*before[1:], arguments, *after[:-1]]
        return {
            "type": "tag",
            "begin": _bare(before[0]),
            "content": arguments if len(middle) == 1 else sequence(*middle),
            "end": _bare(after[-1]) if after else "",
        }

    def _as_parts(self, pieces: Sequence[str]) -> list[Format]:
        """Texts and marks as parts, with adjacent texts merged."""
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

    def _syntax(self, name: str) -> _Syntax:
        if self._profile.tools == "hermes":
            before = [hermes.BEGIN, f'\n{{"name": "{name}", "arguments": ']
            return _Syntax(before, ["}\n", hermes.END], "\n")
        if self._profile.tools == "llama3":
            return _Syntax([f'{{"name": "{name}", "parameters": '], ["}"], "; ")
        if self._profile.tools == "deepseek_v3":
            return self._deepseek(name)
        if self._profile.listed:
            return _Syntax([f'{{"name": "{name}", "arguments": '], ["}"], ", ")
        return _Syntax([mistral.BEGIN, name, mistral.ARGUMENTS], [], "")

    def _deepseek(self, name: str) -> _Syntax:
        call, separator, end = (
            deepseek_marks.CALL,
            deepseek_marks.SEPARATOR,
            deepseek_marks.CALL_END,
        )
        if self._profile.fenced:
            before = [call, "function", separator, f"{name}\n```json\n"]
            return _Syntax(before, ["\n```", end], "\n")
        return _Syntax([call, name, separator], [end], "")


def sequence(*elements: Format) -> Format:
    """All elements, in this order."""
    return {"type": "sequence", "elements": list(elements)}


def either(elements: Sequence[Format]) -> Format:
    """One of the elements."""
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def text(value: str) -> Format:
    """Exactly these characters."""
    return {"type": "const_string", "value": value}


def _bare(part: Format) -> Any:
    """A part in the form of a tag's `begin` and `end`: the text itself, or a token."""
    return part["value"] if part["type"] == "const_string" else part
