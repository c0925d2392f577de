"""Llama 3: the answer is {"name": …, "parameters": …}, several separated by semicolons.

<|python_tag|> may precede a call. An object that names none of the tools is an answer in JSON.
"""

from collections.abc import Collection

from services.gateway.answers.base import BufferedParser
from services.gateway.answers.call_json import CallObject
from services.gateway.answers.marks import match_prefix

TAG = "<|python_tag|>"


class Llama3Parser(BufferedParser):
    """See events.Parser.

    Args:
        names: of the request's tools.
    """

    marks = (TAG,)

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = names
        self._step = self._parse_start

    @property
    def marked(self) -> bool:
        return False  # a program may follow the tag as well

    def after_mark(self, mark: str) -> None:
        self._unconfirmed = self._unconfirmed.removesuffix(mark)  # a special token is never text
        self._step = self._parse_start

    def after_object(self) -> None:
        self._step = self._parse_between

    def _parse_start(self) -> bool:
        """Read the beginning of the answer, or what follows a tag or a separator."""
        space = self.rest[: len(self.rest) - len(self.rest.lstrip())]
        self._unconfirmed += space
        self.rest = self.rest[len(space) :]
        if not self.rest:
            return False
        found = match_prefix(self.rest, (TAG,))
        if found.pending:
            return False
        if found.mark is not None:
            self.rest = self.rest.removeprefix(found.mark)
        elif self.rest[0] == "{":
            self.begin_object(CallObject(self._names))
        else:
            self.emit_unconfirmed()
        return True

    def _parse_between(self) -> bool:
        if not self.skip_space():
            return False
        found = match_prefix(self.rest, (TAG,))
        if found.pending:
            return False
        if found.mark is not None:
            self.rest = self.rest.removeprefix(found.mark)
            self._step = self._parse_start
        elif self.rest[0] in ";,":
            self._unconfirmed += self.rest[0]
            self.rest = self.rest[1:]
            self._step = self._parse_start
        elif self.rest[0] == "{":
            self.begin_object(CallObject(self._names))
        else:
            self._step = self.parse_text
        return True
