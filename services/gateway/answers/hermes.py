"""Hermes, Qwen2.5 and Qwen3: <tool_call>{"name": …, "arguments": …}</tool_call>, any number."""

from services.gateway.answers.base import BufferedParser
from services.gateway.answers.call_json import CallObject
from services.gateway.answers.marks import begins

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(BufferedParser):
    """See events.Parser."""

    marks = (BEGIN,)

    def after_mark(self, mark: str) -> None:
        self.begin_object(CallObject())

    def after_object(self) -> None:
        self._step = self._close

    def _close(self) -> bool:
        if not self.skip_space():
            return False
        found = begins(self.rest, (END,))
        if found == "":
            return False
        self.rest = self.rest.removeprefix(END)
        self._step = self.text
        return True
