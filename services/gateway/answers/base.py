"""What the parsers of calls share: a buffer, worked off step by step."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from services.gateway.answers.call_json import SPACE, CallObject
from services.gateway.answers.events import Event, Text, joined
from services.gateway.answers.marks import cut


class BufferedParser(ABC):
    """Works through `rest` by steps: methods that return whether they got further, or wait for more
    text unless they are certain. A subclass chooses the next by setting `_step`."""

    marks: Sequence[str] = ()
    """What ends text; no mark begins another."""

    def __init__(self) -> None:
        self.rest = ""
        self.out: list[Event] = []
        self.seen_call = False
        self._undo = ""
        """What stood before the object that is being read, should it be no call."""
        self._call = CallObject()
        self._step: Callable[[], bool] = self.text

    def feed(self, text: str) -> list[Event]:
        """See Parser."""
        self.rest += text
        while self.rest and self._step():
            pass
        return self._taken()

    def finish(self) -> list[Event]:
        """See Parser. What is left of a call that has a mark is no text and not said."""
        if self._step == self.text and not (self.seen_call and self.rest.isspace()):
            self.out.append(Text(self.rest))
        elif not self.marked and not self._call.certain:
            self.out.append(Text(self._undo + self.rest))
        self.rest = ""
        return self._taken()

    @property
    def marked(self) -> bool:
        """Whether a mark, which no text has by chance, said that a call follows."""
        return True

    @abstractmethod
    def after_mark(self, mark: str) -> None:
        """A mark was found and taken: choose the step that reads what follows."""

    def text(self) -> bool:
        """Give text out up to a mark; white space around calls is none."""
        if self.seen_call and not self._lead:
            self.rest = self.rest.lstrip()
        found = cut(self.rest, self.marks)
        if found.text:
            self._lead = True
            self.out.append(Text(found.text))
        self.rest = found.rest
        if found.mark is None:
            return False
        self._undo = found.space + found.mark
        self.after_mark(found.mark)
        return True

    _lead = False
    """Whether text has begun since the last call."""

    def begin_object(self, call: CallObject) -> None:
        """Read one object next."""
        self._call = call
        self._step = self.object

    def object(self) -> bool:
        """Read a call's object as far as it is here."""
        taken = self._call.feed(self.rest)
        if not self._call.certain:
            self._undo += self.rest[:taken]
        self.rest = self.rest[taken:]
        self.out.extend(self._call.take())
        if self._call.broken:
            self.no_call()
        elif self._call.done:
            self.end_call()
            self.after_object()
        return True

    def end_call(self) -> None:
        """A call is over: text may follow, and white space before it is none."""
        self.seen_call, self._undo, self._lead = True, "", False
        self._step = self.text

    def after_object(self) -> None:
        """Choose the step after a call's object."""
        self._step = self.text

    def no_call(self) -> None:
        """What was taken for a call is text."""
        self.out.append(Text(self._undo))
        self._undo, self._lead = "", True
        self._step = self.text

    def skip_space(self) -> bool:
        """Drop white space; whether anything is left."""
        self.rest = self.rest.lstrip(SPACE)
        return bool(self.rest)

    def _taken(self) -> list[Event]:
        out, self.out = self.out, []
        return joined(out)
