"""Mistral: [TOOL_CALLS][{"name": …, "arguments": …}, …], or [TOOL_CALLS]name[ARGS]{…} a call."""

from services.gateway.answers.base import BufferedParser
from services.gateway.answers.call_json import CallObject, JsonSpan
from services.gateway.answers.events import CallArguments, CallBegun

BEGIN, ARGUMENTS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralParser(BufferedParser):
    """See events.Parser."""

    marks = (BEGIN,)

    def __init__(self) -> None:
        super().__init__()
        self._span = JsonSpan("0")

    def after_mark(self, mark: str) -> None:
        self._step = self._lead_in

    def after_object(self) -> None:
        self._step = self._in_list

    def _lead_in(self) -> bool:
        if not self.skip_space():
            return False
        if self.rest[0] == "{":
            self.begin_object(CallObject())
        elif self.rest[0] == "[":
            self.rest = self.rest[1:]
            self._step = self._in_list
        else:
            self._step = self._name
        return True

    def _in_list(self) -> bool:
        self.rest = self.rest.lstrip(" \t\r\n,")
        if not self.rest:
            return False
        if self.rest[0] == "{":
            self.begin_object(CallObject())
            return True
        self.rest = self.rest.removeprefix("]")
        self._step = self.text
        return True

    def _name(self) -> bool:
        """A name, perhaps an id, then arguments."""
        place = self.rest.find("{")
        if place < 0:
            return False
        head = self.rest[:place]
        name = head.split(ARGUMENTS)[0].split(ID)[0].strip()
        if not name:
            self._undo += head
            self.rest = self.rest[place:]
            self.no_call()
            return True
        self.out.append(CallBegun(name))
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
                self.end_call()
                return True
        self.out.append(CallArguments(self.rest))
        self.rest = ""
        return False
