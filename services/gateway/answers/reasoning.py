"""Reasoning apart from the answer. Line breaks at the marks belong to neither."""

from collections.abc import Callable
from dataclasses import dataclass

from services.gateway.answers.call_json import SPACE
from services.gateway.answers.events import Event, Reasoning, Text, joined
from services.gateway.answers.marks import begins, cut


@dataclass(frozen=True)
class Marks:
    """What stands around reasoning."""

    begin: str
    end: str


THINK = Marks("<think>", "</think>")
MISTRAL = Marks("[THINK]", "[/THINK]")


class ReasoningParser:
    """See events.Parser; says Reasoning and Text.

    Args:
        marks: of the model.
        opened: the prompt ended with the first mark; otherwise the answer decides.
    """

    def __init__(self, marks: Marks, *, opened: bool) -> None:
        self._marks = marks
        self._rest = ""
        self._out: list[Event] = []
        self._begun = False
        self.reasoned = opened
        """Whether the answer holds reasoning."""
        self.answering = False
        """Whether the reasoning is over, or there was none."""
        self._step: Callable[[], bool] = self._inside if opened else self._undecided

    def feed(self, text: str) -> list[Event]:
        """See Parser."""
        self._rest += text
        while self._rest and self._step():
            pass
        return self._taken()

    def finish(self) -> list[Event]:
        """See Parser."""
        inside = self.reasoned and not self.answering
        if inside:
            self._rest = self._rest.rstrip("\n")
        self._out.append(Reasoning(self._rest) if inside else Text(self._rest))
        self._rest = ""
        return self._taken()

    def _undecided(self) -> bool:
        """At the beginning: a mark, perhaps after white space, or the answer itself."""
        bare = self._rest.lstrip(SPACE)
        if not bare:
            return False
        found = begins(bare, (self._marks.begin,))
        if found == "":
            return False
        if found is None:
            self.answering, self._step = True, self._answer
        else:
            self._rest = bare.removeprefix(found)
            self.reasoned, self._step = True, self._inside
        return True

    def _inside(self) -> bool:
        if not self._begun:
            self._rest = self._rest.lstrip(SPACE)
        found = cut(self._rest, (self._marks.end,))
        self._begun = self._begun or bool(found.text)
        self._out.append(Reasoning(found.text))
        self._rest = found.rest
        if found.mark is None:
            return False
        self.answering, self._step = True, self._before_answer
        return True

    def _before_answer(self) -> bool:
        self._rest = self._rest.lstrip("\r\n")
        if not self._rest:
            return False
        self._step = self._answer
        return True

    def _answer(self) -> bool:
        self._out.append(Text(self._rest))
        self._rest = ""
        return False

    def _taken(self) -> list[Event]:
        out, self._out = self._out, []
        return joined(out)
