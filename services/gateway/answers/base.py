"""The base of the tool-call parsers: a text buffer and the step that reads it next."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from services.gateway.answers.call_json import SPACE, CallObject, JsonSpan
from services.gateway.answers.events import CallArguments, Event, Text, joined
from services.gateway.answers.marks import cut as cut_at
from services.gateway.answers.marks import without_begun_mark


class BufferedParser(ABC):
    """Runs the current step until it needs more text.

    A step is a method that consumes the start of `rest` and returns whether it made progress. A
    subclass selects the next step by setting `_step`.
    """

    marks: Sequence[str] = ()
    """Marks that end plain text; no mark is a prefix of another."""

    def __init__(self) -> None:
        self.rest = ""
        self.out: list[Event] = []
        self.seen_call = False
        self._unconfirmed = ""
        """Text before and of the object being read; emitted as text if it is not a call."""
        self._call = CallObject()
        self._span = JsonSpan("0")
        self._has_text = False
        """Whether text has begun since the last call."""
        self._step: Callable[[], bool] = self.parse_text

    def feed(self, text: str) -> list[Event]:
        """See Parser."""
        self.rest += text
        while self.rest and self._step():
            pass
        return self._take_events()

    def finish(self, *, cut: bool = False) -> list[Event]:
        """See Parser. The rest of an incomplete call that has a mark is dropped."""
        if self._step == self.parse_text:
            text = self.rest
            if cut:
                after_call = self.seen_call and not self._has_text
                text = without_begun_mark(text, self.marks, least=1 if after_call else 2)
            if not (self.seen_call and not text.strip()):
                self.out.append(Text(text))
        elif not self.marked and not self._call.certain and not (cut and self.seen_call):
            self.out.append(Text(self._unconfirmed + self.rest))
        self.rest = ""
        return self._take_events()

    @property
    def marked(self) -> bool:
        """Whether calls begin with a mark, which plain text never contains by chance."""
        return True

    @abstractmethod
    def after_mark(self, mark: str) -> None:
        """Select the step that reads what follows a mark, which has been removed from `rest`."""

    def parse_text(self) -> bool:
        """Emit text up to the next mark, without the white space around calls."""
        if self.seen_call and not self._has_text:
            self.rest = self.rest.lstrip()
        found = cut_at(self.rest, self.marks)
        if found.text:
            self._has_text = True
            self.out.append(Text(found.text))
        self.rest = found.rest
        if found.mark is None:
            return False
        self._unconfirmed = found.space + found.mark
        self.after_mark(found.mark)
        return True

    def begin_object(self, call: CallObject) -> None:
        """Read a JSON object that holds a whole call next."""
        self._call = call
        self._step = self.parse_object

    def parse_object(self) -> bool:
        """Read a call's object as far as it has arrived."""
        taken = self._call.feed(self.rest)
        if not self._call.certain:
            self._unconfirmed += self.rest[:taken]
        self.rest = self.rest[taken:]
        self.out.extend(self._call.take_events())
        if self._call.broken:
            self.emit_unconfirmed()
        elif self._call.done:
            self.end_call()
            self.after_object()
        return True

    def after_object(self) -> None:
        """Select the step after a call's object."""
        self._step = self.parse_text

    def begin_arguments(self, brace: int) -> None:
        """Read the arguments of a call next; `brace` is where they begin in `rest`."""
        self.out.append(CallArguments("{"))
        self.rest = self.rest[brace + 1 :]
        self._span = JsonSpan("{")
        self._step = self.parse_arguments

    def parse_arguments(self) -> bool:
        """Emit arguments up to the brace that closes them."""
        for place, char in enumerate(self.rest):
            self._span.takes(char)
            if self._span.done:
                self.out.append(CallArguments(self.rest[: place + 1]))
                self.rest = self.rest[place + 1 :]
                self.after_arguments()
                return True
        self.out.append(CallArguments(self.rest))
        self.rest = ""
        return False

    def after_arguments(self) -> None:
        """Select the step after the arguments of `begin_arguments`."""
        self.end_call()

    def end_call(self) -> None:
        """End a call: text may follow, without the white space before it."""
        self.seen_call, self._unconfirmed, self._has_text = True, "", False
        self._step = self.parse_text

    def emit_unconfirmed(self) -> None:
        """Emit as text what looked like a call and is none."""
        self.out.append(Text(self._unconfirmed))
        self._unconfirmed, self._has_text = "", True
        self._step = self.parse_text

    def skip_space(self) -> bool:
        """Drop leading white space; returns whether any text is left."""
        self.rest = self.rest.lstrip(SPACE)
        return bool(self.rest)

    def _take_events(self) -> list[Event]:
        out, self.out = self.out, []
        return joined(out)
