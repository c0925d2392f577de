"""What the parsers return: pieces of text, reasoning and tool calls, in the answer's order."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The start of a tool call; the CallArguments up to the next one belong to it."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON text of the current call's arguments."""

    text: str


Event = Text | Reasoning | CallBegun | CallArguments


class Parser(Protocol):
    """Reads text in pieces. The joined events do not depend on how the text is divided."""

    def feed(self, text: str) -> list[Event]:
        """Add text; returns the events that are now certain."""

    def finish(self, *, cut: bool = False) -> list[Event]:
        """End the text; returns the events that were held back.

        Args:
            cut: the answer was cut, by its length: a mark that has begun is not text.
        """


def joined(events: Iterable[Event]) -> list[Event]:
    """Merge adjacent events of one kind and drop empty ones."""
    out: list[Event] = []
    for event in events:
        if isinstance(event, CallBegun):
            out.append(event)
        elif event.text:
            last = out[-1] if out else None
            if type(last) is type(event):
                out[-1] = type(event)(last.text + event.text)
            else:
                out.append(event)
    return out
