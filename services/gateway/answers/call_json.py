"""One call as a JSON object, {"name": …, "arguments": …}, read character by character.

The arguments are passed on as they come, unchecked. An end mark inside one of their strings ends
nothing: only the JSON says where the object ends.
"""

import json
from collections.abc import Callable, Collection

from services.gateway.answers.events import CallArguments, CallBegun, Event

SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")


class JsonSpan:
    """Finds the end of one JSON value, given its first character."""

    def __init__(self, first: str) -> None:
        self.done = False
        self._in_string = first == '"'
        self._depth = int(first in "{[")
        self._scalar = not self._in_string and not self._depth
        self._escaped = False

    def takes(self, char: str) -> bool:
        """Whether the character is a part of the value; `done` is set with the last one."""
        if self._scalar:
            self.done = char in ",}]" or char in SPACE
            return not self.done
        if self._in_string:
            self._string(char)
        elif char == '"':
            self._in_string = True
        else:
            self._depth += (char in "{[") - (char in "}]")
        self.done = not self._in_string and self._depth <= 0
        return True

    def _string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False


class CallObject:
    """Reads one object.

    Args:
        names: if given, the object is a call only if it names one of these and has arguments;
            until both are known nothing is said of it.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        self.done = False
        self.broken = False
        """It is no call: what `feed` took of it is text."""
        self._names = names
        self._name: str | None = None
        self._has_arguments = False
        self._told = False
        self._arguments: list[str] = []
        self._key = ""
        self._value: list[str] = []
        self._span = JsonSpan("0")
        self._streamed = False
        self._state: Callable[[str], None] = self._open

    @property
    def certain(self) -> bool:
        """Whether it is a call, whatever follows."""
        return self._name is not None and (self._has_arguments or self._names is None)

    def feed(self, text: str) -> int:
        """Read on; returns how many characters were taken, all of them before the end."""
        for place, char in enumerate(text):
            self._state(char)
            if self.done or self.broken:
                return place + 1
        return len(text)

    def take(self) -> list[Event]:
        """What became certain."""
        if not self.certain:
            return []
        assert self._name is not None
        events: list[Event] = [] if self._told else [CallBegun(self._name)]
        events.append(CallArguments("".join(self._arguments)))
        self._told = True
        self._arguments.clear()
        return events

    def _open(self, char: str) -> None:
        if char == "{":
            self._state = self._before_key
        elif char not in SPACE:
            self._fail()

    def _before_key(self, char: str) -> None:
        if char == '"':
            self._begin(char, self._in_key)
        elif char == "}":
            self._end()
        elif char not in SPACE and char != ",":
            self._fail()

    def _in_key(self, char: str) -> None:
        self._span.takes(char)
        self._value.append(char)
        if self._span.done:
            self._key = _content("".join(self._value))
            self._state = self._before_value

    def _before_value(self, char: str) -> None:
        if char == ":" or char in SPACE:
            return
        if char in ",}]":
            self._fail()
            return
        self._begin(char, self._in_value)
        self._has_arguments = self._has_arguments or self._key in _ARGUMENTS
        self._streamed = self._key in _ARGUMENTS and char in "{["
        if self._streamed:
            self._arguments.append(char)

    def _in_value(self, char: str) -> None:
        mine = self._span.takes(char)
        if mine:
            (self._arguments if self._streamed else self._value).append(char)
        if self._span.done:
            self._state = self._before_key
            self._take_value("".join(self._value))
            if not mine and not self.broken:
                self._before_key(char)

    def _begin(self, char: str, state: Callable[[str], None]) -> None:
        self._span, self._value, self._state = JsonSpan(char), [char], state

    def _take_value(self, text: str) -> None:
        if self._key == "name" and self._name is None:
            name = _content(text) if text.startswith('"') else ""
            if not name or (self._names is not None and name not in self._names):
                self._fail()
            else:
                self._name = name
        elif self._key in _ARGUMENTS and not self._streamed:
            self._arguments.append(_content(text) or "{}")

    def _end(self) -> None:
        if not self.certain:
            self._fail()
            return
        self.done = True
        if not self._has_arguments:
            self._arguments.append("{}")

    def _fail(self) -> None:
        """What was said stays said: a call that is certain ends here."""
        if self.certain:
            self.done = True
        else:
            self.broken = True


def _content(text: str) -> str:
    """What a JSON string says; other values as they are written, null as nothing."""
    try:
        value = json.loads(text)
    except ValueError:
        return text.strip('"')
    if value is None:
        return ""
    return value if isinstance(value, str) else text
