"""Reads one call as a JSON object, {"name": …, "arguments": …}, character by character.

The arguments are emitted as they arrive, unchecked. Only the JSON syntax decides where the object
ends: an end mark inside a string does not end it.
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
        """Add a character; returns whether it belongs to the value. Sets `done` at its end."""
        if self._scalar:
            self.done = char in ",}]" or char in SPACE
            return not self.done
        if self._in_string:
            self._take_string_char(char)
        elif char == '"':
            self._in_string = True
        else:
            self._depth += (char in "{[") - (char in "}]")
        self.done = not self._in_string and self._depth <= 0
        return True

    def _take_string_char(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False


class CallObject:
    """Reads one call's object.

    Args:
        names: if given, the object is a call only if it names one of these and has arguments; no
            event is returned until both are known.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        self.done = False
        self.broken = False
        """The object is not a call: what `feed` consumed is text."""
        self._names = names
        self._name: str | None = None
        self._has_arguments = False
        self._begun_sent = False
        self._arguments: list[str] = []
        self._key = ""
        self._value: list[str] = []
        self._span = JsonSpan("0")
        self._streamed = False
        self._state: Callable[[str], None] = self._parse_open

    @property
    def certain(self) -> bool:
        """Whether the object is a call, independent of what follows."""
        return self._name is not None and (self._has_arguments or self._names is None)

    def feed(self, text: str) -> int:
        """Read text; returns how many characters were consumed: all of them before the end."""
        for place, char in enumerate(text):
            self._state(char)
            if self.done or self.broken:
                return place + 1
        return len(text)

    def take_events(self) -> list[Event]:
        """Return the events that have become certain since the last time."""
        if not self.certain:
            return []
        assert self._name is not None
        events: list[Event] = [] if self._begun_sent else [CallBegun(self._name)]
        events.append(CallArguments("".join(self._arguments)))
        self._begun_sent = True
        self._arguments.clear()
        return events

    def _parse_open(self, char: str) -> None:
        if char == "{":
            self._state = self._parse_before_key
        elif char not in SPACE:
            self._fail()

    def _parse_before_key(self, char: str) -> None:
        if char == '"':
            self._begin(char, self._parse_key)
        elif char == "}":
            self._end()
        elif char not in SPACE and char != ",":
            self._fail()

    def _parse_key(self, char: str) -> None:
        self._span.takes(char)
        self._value.append(char)
        if self._span.done:
            self._key = _content("".join(self._value))
            self._state = self._parse_before_value

    def _parse_before_value(self, char: str) -> None:
        if char == ":" or char in SPACE:
            return
        if char in ",}]":
            self._fail()
            return
        self._begin(char, self._parse_value)
        self._has_arguments = self._has_arguments or self._key in _ARGUMENTS
        self._streamed = self._key in _ARGUMENTS and char in "{["
        if self._streamed:
            self._arguments.append(char)

    def _parse_value(self, char: str) -> None:
        inside = self._span.takes(char)
        if inside:
            (self._arguments if self._streamed else self._value).append(char)
        if self._span.done:
            self._state = self._parse_before_key
            self._use_value("".join(self._value))
            if not inside and not self.broken:
                self._parse_before_key(char)

    def _begin(self, char: str, state: Callable[[str], None]) -> None:
        self._span, self._value, self._state = JsonSpan(char), [char], state

    def _use_value(self, text: str) -> None:
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
        """End at a syntax error; events of a certain call cannot be taken back."""
        if self.certain:
            self.done = True
        else:
            self.broken = True


def _content(text: str) -> str:
    """The content of a JSON string; null as "", other values as they are written."""
    try:
        value = json.loads(text)
    except ValueError:
        return text.strip('"')
    if value is None:
        return ""
    return value if isinstance(value, str) else text
