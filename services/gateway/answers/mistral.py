"""Mistral: [TOOL_CALLS][{"name": …, "arguments": …}, …], or [TOOL_CALLS]name[ARGS]{…} per call."""

from services.gateway.answers.base import BufferedParser
from services.gateway.answers.call_json import CallObject
from services.gateway.answers.events import CallBegun

BEGIN, ARGUMENTS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class MistralParser(BufferedParser):
    """See events.Parser."""

    marks = (BEGIN,)

    def after_mark(self, mark: str) -> None:
        self._step = self._parse_start

    def after_object(self) -> None:
        self._step = self._parse_list

    def _parse_start(self) -> bool:
        if not self.skip_space():
            return False
        if self.rest[0] == "{":
            self.begin_object(CallObject())
        elif self.rest[0] == "[":
            self.rest = self.rest[1:]
            self._step = self._parse_list
        else:
            self._step = self._parse_name
        return True

    def _parse_list(self) -> bool:
        self.rest = self.rest.lstrip(" \t\r\n,")
        if not self.rest:
            return False
        if self.rest[0] == "{":
            self.begin_object(CallObject())
            return True
        self.rest = self.rest.removeprefix("]")
        self._step = self.parse_text
        return True

    def _parse_name(self) -> bool:
        """Read a name and an optional id, up to the arguments."""
        brace = self.rest.find("{")
        if brace < 0:
            return False
        head = self.rest[:brace]
        name = head.split(ARGUMENTS)[0].split(ID)[0].strip()
        if not name:
            self._unconfirmed += head
            self.rest = self.rest[brace:]
            self.emit_unconfirmed()
            return True
        self.out.append(CallBegun(name))
        self.begin_arguments(brace)
        return True
