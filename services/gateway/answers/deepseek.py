"""DeepSeek V3, R1 and V3.1: a list of calls between marks.

V3 writes `function`, a mark, the name, and arguments in a fenced block; V3.1 the name, a mark and
bare arguments. Both are read, whichever comes.
"""

from services.common.text.deepseek_marks import CALL, CALL_END, LIST, LIST_END, SEPARATOR
from services.gateway.answers.base import BufferedParser
from services.gateway.answers.call_json import JsonSpan
from services.gateway.answers.events import CallArguments, CallBegun
from services.gateway.answers.marks import begins, cut

_ENDS = (CALL_END, LIST_END)


class DeepseekParser(BufferedParser):
    """See events.Parser."""

    marks = (LIST, CALL, LIST_END)

    def __init__(self) -> None:
        super().__init__()
        self._head = ""
        self._span = JsonSpan("0")

    def after_mark(self, mark: str) -> None:
        self._step = self._name if mark == CALL else self._between

    def _between(self) -> bool:
        """In the list, outside a call."""
        if not self.skip_space():
            return False
        found = begins(self.rest, (CALL, LIST_END))
        if found == "":
            return False
        self.rest = self.rest.removeprefix(found or "")
        self._step = self._name if found == CALL else self.text
        if found is None:
            self.no_call()
        return True

    def _name(self) -> bool:
        """Up to the separator: a name, or the word `function` and then the name on a line."""
        found = cut(self.rest, (SEPARATOR,))
        if found.mark is None:
            return False
        self._head = found.text.strip()
        self.rest = found.rest
        self._step = self._after_separator
        return True

    def _after_separator(self) -> bool:
        if not self.skip_space():
            return False
        if self.rest[0] != "{":  # V3: the name's own line
            line, _, rest = self.rest.partition("\n")
            if not rest and "\n" not in self.rest:
                return False
            self._head, self.rest = line.strip(), rest
        self.out.append(CallBegun(self._head))
        self._step = self._before_arguments
        return True

    def _before_arguments(self) -> bool:
        """Drop a fence."""
        place = self.rest.find("{")
        ends = cut(self.rest if place < 0 else self.rest[:place], _ENDS)
        if ends.mark is not None:
            self.out.append(CallArguments("{}"))
            self.rest = self.rest[len(ends.text + ends.space) :]
            self._step = self._after_arguments
            return True
        if place < 0:
            return False
        self.out.append(CallArguments("{"))
        self.rest = self.rest[place + 1 :]
        self._span = JsonSpan("{")
        self._step = self._arguments
        return True

    def _arguments(self) -> bool:
        for place, char in enumerate(self.rest):
            self._span.takes(char)
            if self._span.done:
                self.out.append(CallArguments(self.rest[: place + 1]))
                self.rest = self.rest[place + 1 :]
                self._step = self._after_arguments
                return True
        self.out.append(CallArguments(self.rest))
        self.rest = ""
        return False

    def _after_arguments(self) -> bool:
        """Drop a fence's end and the call's."""
        found = cut(self.rest, _ENDS)
        if found.mark is None:
            return False
        self.rest = found.rest
        self.end_call()
        if found.mark == CALL_END:
            self._step = self._between
        return True
