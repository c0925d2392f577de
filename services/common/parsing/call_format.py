"""Calls as a structural tag: written as the model's own parser reads them, so that an enforced call
looks to the model like any other."""

from collections.abc import Sequence
from typing import Any

from services.common.parsing import deepseek, hermes
from services.common.parsing.profile import CALL_MARKS, ChatProfile
from services.common.parsing.tools import Tool, ToolUse

Format = dict[str, Any]
ANY_OBJECT: Format = {"type": "object"}


class CallFormat:
    """The formats of one request's calls. `schemas` are the parts that hold a tool's schema."""

    def __init__(self, profile: ChatProfile, use: ToolUse) -> None:
        self._profile = profile
        self._use = use
        self._chosen = [tool for tool in use.tools if not use.named or tool.name == use.named]
        self._one = not use.parallel or bool(use.named)
        self.schemas: list[tuple[Format, int]] = []
        """A part, by identity, and its tool's index."""

    @property
    def enforceable(self) -> bool:
        """Whether a grammar can hold all that a call consists of."""
        if self._profile.tools not in ("hermes", "llama3", "deepseek_v3"):
            return False
        written = () if self._profile.tools == "llama3" else CALL_MARKS[self._profile.tools]
        return not any(self._profile.is_special(mark) for mark in written)

    def some(self) -> Format:
        """One call or more."""
        calls = self._several()
        if self._profile.tools != "deepseek_v3":
            return calls
        return sequence(text(deepseek.LIST), calls, text(deepseek.LIST_END))

    def among_text(self) -> Format | None:
        """Free text in which each call holds to its schema, where something is demanded of calls
        and a mark announces them; else None."""
        demands = any(tool.strict for tool in self._use.tools) or not self._use.parallel
        if not demands or self._profile.tools != "hermes" or not self.enforceable:
            return None
        return {
            "type": "triggered_tags",
            "triggers": [hermes.BEGIN],
            "tags": [self._tag(tool) for tool in self._chosen],
            "at_least_one": False,
            "stop_after_first": not self._use.parallel,
        }

    def after_opening(self) -> Format:
        """What follows Mistral's mark. Without a list a second call would need the mark again."""
        if self._profile.listed:
            return sequence(text("["), self._several(), text("]"))
        return either([sequence(text(t.name), self._arguments(t)) for t in self._chosen])

    def _several(self) -> Format:
        return {
            "type": "tags_with_separator",
            "tags": [self._tag(tool) for tool in self._chosen],
            "separator": self._separator(),
            "at_least_one": True,
            "stop_after_first": self._one,
        }

    def _separator(self) -> str:
        if self._profile.tools == "deepseek_v3":
            return "\n" if self._profile.fenced else ""
        return {"hermes": "\n", "llama3": "; "}.get(self._profile.tools, ", ")

    def _tag(self, tool: Tool) -> Format:
        begin, end = self._around(tool.name)
        return {"type": "tag", "begin": begin, "content": self._arguments(tool), "end": end}

    def _arguments(self, tool: Tool) -> Format:
        enforced = tool.strict is not False if self._use.required else bool(tool.strict)
        part: Format = {
            "type": "json_schema",
            "json_schema": dict(tool.schema) if enforced else ANY_OBJECT,
        }
        self.schemas.append((part, self._use.tools.index(tool)))
        return part

    def _around(self, name: str) -> tuple[str, str]:
        """What stands before and after a call's arguments."""
        if self._profile.tools == "hermes":
            return f'{hermes.BEGIN}\n{{"name": "{name}", "arguments": ', f"}}\n{hermes.END}"
        if self._profile.tools == "llama3":
            return f'{{"name": "{name}", "parameters": ', "}"
        if self._profile.tools == "mistral":
            return f'{{"name": "{name}", "arguments": ', "}"
        if self._profile.fenced:
            begin = f"{deepseek.CALL}function{deepseek.SEPARATOR}{name}\n```json\n"
            return begin, f"\n```{deepseek.CALL_END}"
        return f"{deepseek.CALL}{name}{deepseek.SEPARATOR}", deepseek.CALL_END


def sequence(*elements: Format) -> Format:
    """One after the other."""
    return {"type": "sequence", "elements": list(elements)}


def either(elements: Sequence[Format]) -> Format:
    """One of them."""
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": list(elements)}


def text(value: str) -> Format:
    """These very characters."""
    return {"type": "const_string", "value": value}
