"""DeepSeek V3, R1 and V3.1: a list of calls between marks.

V3 writes `function`, a mark, the name, and the arguments in a fenced block. V3.1 writes the name, a
mark and bare arguments. The parser reads both forms.
"""

from services.common.text.deepseek_marks import CALL, CALL_END, LIST, LIST_END, SEPARATOR
from services.gateway.answers.base import BufferedParser
from services.gateway.answers.events import CallArguments, CallBegun
from services.gateway.answers.marks import cut, match_prefix

_ENDS = (CALL_END, LIST_END)


class DeepseekParser(BufferedParser):
    """See events.Parser."""

    marks = (LIST, CALL, LIST_END)

    def __init__(self) -> None:
        super().__init__()
        self._head = ""
        """The text before the separator of the current call."""

    def after_mark(self, mark: str) -> None:
        self._step = self._parse_head if mark == CALL else self._parse_between

    def _parse_between(self) -> bool:
        """Read what stands in the list between two calls."""
        if not self.skip_space():
            return False
        found = match_prefix(self.rest, (CALL, LIST_END))
        if found.pending:
            return False
        if found.mark is None:
            self.emit_unconfirmed()
            return True
        self.rest = self.rest.removeprefix(found.mark)
        self._step = self._parse_head if found.mark == CALL else self.parse_text
        return True

    def _parse_head(self) -> bool:
        """Read up to the separator: a name (V3.1) or the word `function` (V3)."""
        found = cut(self.rest, (SEPARATOR,))
        if found.mark is None:
            return False
        self._head = found.text.strip()
        self.rest = found.rest
        self._step = self._parse_name
        return True

    def _parse_name(self) -> bool:
        if not self.skip_space():
            return False
        if self.rest[0] != "{":  # V3: the name is the rest of this line
            line, newline, rest = self.rest.partition("\n")
            if not newline:
                return False
            self._head, self.rest = line.strip(), rest
        self.out.append(CallBegun(self._head))
        self._step = self._parse_before_arguments
        return True

    def _parse_before_arguments(self) -> bool:
        """Drop a fence."""
        brace = self.rest.find("{")
        ends = cut(self.rest if brace < 0 else self.rest[:brace], _ENDS)
        if ends.mark is not None:
            self.out.append(CallArguments("{}"))
            self.rest = self.rest[len(ends.text + ends.space) :]
            self._step = self._skip_call_end
            return True
        if brace < 0:
            return False
        self.begin_arguments(brace)
        return True

    def after_arguments(self) -> None:
        self._step = self._skip_call_end

    def _skip_call_end(self) -> bool:
        """Drop the end of a fence and the end mark of the call."""
        found = cut(self.rest, _ENDS)
        if found.mark is None:
            return False
        self.rest = found.rest
        self.end_call()
        if found.mark == CALL_END:
            self._step = self._parse_between
        return True
