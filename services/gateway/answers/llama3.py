"""Llama 3: the answer is {"name": …, "parameters": …}, several with semicolons between them,
perhaps after <|python_tag|>. An object that names none of the tools is an answer in JSON."""

from collections.abc import Collection

from services.gateway.answers.base import BufferedParser
from services.gateway.answers.call_json import CallObject
from services.gateway.answers.marks import begins

TAG = "<|python_tag|>"


class Llama3Parser(BufferedParser):
    """See events.Parser."""

    marks = (TAG,)

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = names
        self._step = self._start

    @property
    def marked(self) -> bool:
        return False  # what follows the tag may be a program, too

    def after_mark(self, mark: str) -> None:
        self._undo = self._undo.removesuffix(mark)  # a special token: never text itself
        self._step = self._start

    def after_object(self) -> None:
        self._step = self._between

    def _start(self) -> bool:
        """The beginning of the answer, or after a tag."""
        lead = self.rest[: len(self.rest) - len(self.rest.lstrip())]
        self._undo += lead
        self.rest = self.rest[len(lead) :]
        if not self.rest:
            return False
        found = begins(self.rest, (TAG,))
        if found == "":
            return False
        if found:
            self.rest = self.rest.removeprefix(found)
        elif self.rest[0] == "{":
            self.begin_object(CallObject(self._names))
        else:
            self.no_call()
        return True

    def _between(self) -> bool:
        if not self.skip_space():
            return False
        found = begins(self.rest, (TAG,))
        if found == "":
            return False
        if found or self.rest[0] in ";,":
            self._undo += "" if found else self.rest[0]
            self.rest = self.rest[len(found or ";") :]
            self._step = self._start
        elif self.rest[0] == "{":
            self.begin_object(CallObject(self._names))
        else:
            self._step = self.text
        return True
