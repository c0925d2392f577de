"""What a parser says of an answer, in order; joined, the pieces of a kind are the whole."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what stands before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of a tool; what follows up to the next one are its arguments."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the JSON text of the last call's arguments."""

    text: str


Event = Text | Reasoning | CallBegun | CallArguments


class Parser(Protocol):
    """Takes text in pieces. Which pieces does not matter: the joined events are the same."""

    def feed(self, text: str) -> list[Event]:
        """What became certain with this text."""

    def finish(self) -> list[Event]:
        """What was held back; no text comes any more."""


def joined(events: Iterable[Event]) -> list[Event]:
    """Neighbours of one kind as one; empty ones left out."""
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
