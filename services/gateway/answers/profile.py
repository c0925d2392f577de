"""How one model writes calls and reasoning: as its configuration or its chat template tells."""

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


class Marker(Protocol):
    """What is needed of a tokenizer."""

    def id_of(self, token: str) -> int | None:
        """The id of a token by its name."""

    def is_special(self, token_id: int) -> bool:
        """Whether it does not show in text."""


@dataclass(frozen=True)
class ChatProfile:
    """Names of parsers, resolved: never "auto"."""

    tools: str
    reasoning: str
    fenced: bool = False
    """DeepSeek V3's arguments stand in a fenced block."""
    listed: bool = True
    """Mistral's calls stand in a JSON list."""
    special: tuple[tuple[str, int], ...] = ()
    """Marks that are special tokens, with their ids: shown on demand only."""

    @property
    def marks(self) -> Marks | None:
        """Around reasoning, if the model reasons."""
        return REASONING_MARKS.get(self.reasoning)

    def shown_ids(self) -> tuple[int, ...]:
        """Special tokens that the parsers must see."""
        wanted = set(CALL_MARKS.get(self.tools, ()))
        if self.marks is not None:
            wanted |= {self.marks.begin, self.marks.end}
        return tuple(sorted(token_id for mark, token_id in self.special if mark in wanted))

    def id_of(self, mark: str) -> int | None:
        """The id of a mark that is a special token; None for one that is text."""
        return dict(self.special).get(mark)

    def configured(self, tools: str, reasoning: str) -> "ChatProfile":
        """With what an engine was told; "" and "auto" leave what the template says."""
        auto = ("", "auto")
        return replace(
            self,
            tools=self.tools if tools in auto else tools,
            reasoning=self.reasoning if reasoning in auto else reasoning,
        )


def detect(template: str, *, uses_tools: bool, tokenizer: Marker) -> ChatProfile:
    """The profile of a model by its chat template.

    Args:
        uses_tools: whether the template shows tools at all; for one that does not, they are shown
            as Hermes models know them (services/common/text/tool_prompt.py).
    """
    marks = {mark for group in CALL_MARKS.values() for mark in group}
    marks |= {mark for pair in REASONING_MARKS.values() for mark in (pair.begin, pair.end)}
    found = ((mark, tokenizer.id_of(mark)) for mark in sorted(marks))
    special = tuple((m, i) for m, i in found if i is not None and tokenizer.is_special(i))
    if not template and tokenizer.id_of(deepseek_recipe.MARK) is not None:
        return ChatProfile("deepseek_v4", "think", special=special)
    return ChatProfile(
        tools=_tools(template, uses_tools),
        reasoning=_reasoning(template),
        fenced="```json" in template,
        listed=mistral.ARGUMENTS not in template,
        special=special,
    )


def _tools(template: str, uses_tools: bool) -> str:
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
        # Others put XML between the same marks.
        xml = "<function=" in template or "<arg_key>" in template
        return "none" if xml else "hermes"
    return "llama3" if "<|start_header_id|>" in template else "none"


def _reasoning(template: str) -> str:
    for name, marks in REASONING_MARKS.items():
        if marks.end in template:
            return name
    return "none"
