"""How a model writes calls and reasoning, detected from its chat template or configured."""

from dataclasses import dataclass, replace
from typing import Protocol

from services.common.text import deepseek_marks, deepseek_recipe
from services.gateway.answers import hermes, llama3, mistral
from services.gateway.answers.reasoning import MISTRAL, THINK, Marks

REASONING_MARKS = {"think": THINK, "mistral": MISTRAL}
CALL_MARKS = {
    "hermes": (hermes.BEGIN, hermes.END),
    "llama3": (llama3.TAG,),
    "mistral": (mistral.BEGIN, mistral.ARGUMENTS, mistral.ID),
    "deepseek_v3": (
        deepseek_marks.LIST,
        deepseek_marks.LIST_END,
        deepseek_marks.CALL,
        deepseek_marks.CALL_END,
        deepseek_marks.SEPARATOR,
    ),
    "deepseek_v4": (deepseek_recipe.MARK,),
}


class SpecialTokens(Protocol):
    """The part of a tokenizer that is needed here."""

    def id_of(self, token: str) -> int | None:
        """The id of a token by its text; None if there is no such token."""

    def is_special(self, token_id: int) -> bool:
        """Whether the token is left out of decoded text."""


@dataclass(frozen=True)
class ChatProfile:
    """The names of a model's parsers, resolved: never "auto"."""

    tools: str
    reasoning: str
    fenced: bool = False
    """DeepSeek V3: arguments are in a fenced block."""
    listed: bool = True
    """Mistral: calls are in a JSON list."""
    special: tuple[tuple[str, int], ...] = ()
    """Marks that are special tokens, with their ids; decoded only on request."""

    @property
    def marks(self) -> Marks | None:
        """The marks around reasoning; None if the model does not reason."""
        return REASONING_MARKS.get(self.reasoning)

    def visible_ids(self) -> tuple[int, ...]:
        """Ids of special tokens that must be decoded, because the parsers read them."""
        needed = set(CALL_MARKS.get(self.tools, ()))
        if self.marks is not None:
            needed |= {self.marks.begin, self.marks.end}
        return tuple(sorted(token_id for mark, token_id in self.special if mark in needed))

    def id_of(self, mark: str) -> int | None:
        """The id of a mark that is a special token; None if the mark is plain text."""
        return dict(self.special).get(mark)

    def configured(self, tools: str, reasoning: str) -> "ChatProfile":
        """This profile with an engine's configured parsers; "" and "auto" change nothing."""
        auto = ("", "auto")
        return replace(
            self,
            tools=self.tools if tools in auto else tools,
            reasoning=self.reasoning if reasoning in auto else reasoning,
        )


def detect(template: str, *, uses_tools: bool, tokenizer: SpecialTokens) -> ChatProfile:
    """Detect a model's profile from its chat template.

    Args:
        uses_tools: whether the template renders tools. If not, a system message describes them in
            the syntax of Hermes models (services/common/text/tool_prompt.py).
    """
    marks = {mark for group in CALL_MARKS.values() for mark in group}
    marks |= {mark for pair in REASONING_MARKS.values() for mark in (pair.begin, pair.end)}
    found = ((mark, tokenizer.id_of(mark)) for mark in sorted(marks))
    special = tuple((m, i) for m, i in found if i is not None and tokenizer.is_special(i))
    if not template and tokenizer.id_of(deepseek_recipe.MARK) is not None:
        return ChatProfile("deepseek_v4", "think", special=special)
    return ChatProfile(
        tools=_detect_tools(template, uses_tools),
        reasoning=_detect_reasoning(template),
        fenced="```json" in template,
        listed=mistral.ARGUMENTS not in template,
        special=special,
    )


def _detect_tools(template: str, uses_tools: bool) -> str:
    if not template:
        return "none"
    if not uses_tools:
        return "hermes"
    if deepseek_recipe.MARK in template:
        return "deepseek_v4"
    if mistral.BEGIN in template:
        return "mistral"
    if deepseek_marks.LIST in template:
        return "deepseek_v3"
    if hermes.BEGIN in template:
        # Other models put XML between the same marks.
        xml = "<function=" in template or "<arg_key>" in template
        return "none" if xml else "hermes"
    return "llama3" if "<|start_header_id|>" in template else "none"


def _detect_reasoning(template: str) -> str:
    for name, marks in REASONING_MARKS.items():
        if marks.end in template:
            return name
    return "none"
