"""Hermes, Qwen2.5 and Qwen3: any number of <tool_call>{"name": …, "arguments": …}</tool_call>."""

from services.gateway.answers.base import BufferedParser
from services.gateway.answers.call_json import CallObject
from services.gateway.answers.marks import match_prefix

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesParser(BufferedParser):
    """See events.Parser."""

    marks = (BEGIN,)

    def after_mark(self, mark: str) -> None:
        self.begin_object(CallObject())

    def after_object(self) -> None:
        self._step = self._skip_end

    def _skip_end(self) -> bool:
        if not self.skip_space():
            return False
        if match_prefix(self.rest, (END,)).pending:
            return False
        self.rest = self.rest.removeprefix(END)
        self._step = self.parse_text
        return True
