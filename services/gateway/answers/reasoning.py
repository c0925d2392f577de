"""Separates reasoning from the answer. Line breaks at the marks belong to neither."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from services.gateway.answers.call_json import SPACE
from services.gateway.answers.events import Event, Reasoning, Text, joined
from services.gateway.answers.marks import cut as cut_at
from services.gateway.answers.marks import match_prefix, without_begun_mark


@dataclass(frozen=True)
class Marks:
    """The marks around reasoning."""

    begin: str
    end: str


THINK = Marks("<think>", "</think>")
MISTRAL = Marks("[THINK]", "[/THINK]")


class ReasoningStart(StrEnum):
    """What the end of a prompt decides about reasoning."""

    CLOSED = "closed"
    """The answer begins at once."""
    OPEN = "open"
    """The prompt ends with the mark that begins reasoning."""
    FREE = "free"
    """The model decides."""


class ReasoningParser:
    """See events.Parser; returns Reasoning and Text.

    Args:
        marks: of the model.
        opened: the prompt ends with the begin mark; otherwise the answer decides.
    """

    def __init__(self, marks: Marks, *, opened: bool) -> None:
        self._marks = marks
        self._rest = ""
        self._out: list[Event] = []
        self._begun = False
        self.reasoned = opened
        """Whether the answer holds reasoning."""
        self.answering = False
        """Whether the reasoning has ended, or there was none."""
        self._step: Callable[[], bool] = self._parse_inside if opened else self._parse_start

    def feed(self, text: str) -> list[Event]:
        """See Parser."""
        self._rest += text
        while self._rest and self._step():
            pass
        return self._take_events()

    def finish(self, *, cut: bool = False) -> list[Event]:
        """See Parser."""
        inside = self.reasoned and not self.answering
        if cut and not self.answering:
            mark = self._marks.end if inside else self._marks.begin
            self._rest = without_begun_mark(self._rest, (mark,))
        if inside:
            self._rest = self._rest.rstrip("\n")
        self._out.append(Reasoning(self._rest) if inside else Text(self._rest))
        self._rest = ""
        return self._take_events()

    def _parse_start(self) -> bool:
        """Decide whether the answer begins with the begin mark, after optional white space."""
        bare = self._rest.lstrip(SPACE)
        if not bare:
            return False
        found = match_prefix(bare, (self._marks.begin,))
        if found.pending:
            return False
        if found.mark is None:
            self.answering, self._step = True, self._parse_answer
        else:
            self._rest = bare.removeprefix(found.mark)
            self.reasoned, self._step = True, self._parse_inside
        return True

    def _parse_inside(self) -> bool:
        if not self._begun:
            self._rest = self._rest.lstrip(SPACE)
        found = cut_at(self._rest, (self._marks.end,))
        self._begun = self._begun or bool(found.text)
        self._out.append(Reasoning(found.text))
        self._rest = found.rest
        if found.mark is None:
            return False
        self.answering, self._step = True, self._skip_line_breaks
        return True

    def _skip_line_breaks(self) -> bool:
        self._rest = self._rest.lstrip("\r\n")
        if not self._rest:
            return False
        self._step = self._parse_answer
        return True

    def _parse_answer(self) -> bool:
        self._out.append(Text(self._rest))
        self._rest = ""
        return False

    def _take_events(self) -> list[Event]:
        out, self._out = self._out, []
        return joined(out)
