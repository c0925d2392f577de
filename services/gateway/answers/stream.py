"""Splits the text of one stream's messages into content, reasoning and tool calls.

Applied after stream resumption, so each piece of text is parsed once, whichever engine wrote it.
Token ids and log probabilities are sent at once, with the first message made of theirs, even while
the text itself is held back.
"""

import secrets
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from inferfleet_proto.v1 import inference_pb2
from services.gateway.answers.events import (
    CallArguments,
    CallBegun,
    Event,
    Parser,
    Reasoning,
    Text,
    joined,
)
from services.gateway.answers.reasoning import Marks, ReasoningParser, ReasoningStart

_ALPHABET = string.ascii_letters + string.digits
_SHORT_ID_CHARS = 9
_CUT = (
    inference_pb2.FINISH_REASON_MAX_TOKENS,
    inference_pb2.FINISH_REASON_CONTEXT_FULL,
)


@dataclass(frozen=True)
class AnswerParsing:
    """How the answers of one request are parsed."""

    marks: Marks | None
    """The marks around reasoning; None: the model does not reason."""
    start: ReasoningStart
    make_call_parser: Callable[[], Parser] | None
    """None: calls stay text."""
    max_calls: int | None
    """Further calls are dropped; None: no bound."""
    token_bytes: Callable[[int], bytes]
    """The bytes of a token."""
    calls_only: bool = False
    """The constraint allows nothing but calls: all other text is a piece of one that was cut."""
    short_ids: bool = False
    """Make call ids of 9 characters: Mistral's templates accept no others."""

    def open_stream(self) -> "AnswerStream":
        """A parser for the messages of one request."""
        return AnswerStream(self)


class AnswerStream:
    """Parses one stream; owned by the forwarder of the stream."""

    def __init__(self, parsing: AnswerParsing) -> None:
        self._parsing = parsing
        self._choices: dict[int, _Choice] = {}

    def parse(self, raw: bytes) -> list[bytes]:
        """The messages to send for one serialised GenerateResponse."""
        message = inference_pb2.GenerateResponse.FromString(raw)
        event = message.WhichOneof("event")
        if event == "delta":
            return _serialise(self._choice(message.delta.choice).split_delta(message.delta))
        if event == "finished":
            choice = self._choice(message.finished.choice)
            return [*_serialise(choice.finish(message.finished)), raw]
        if event != "summary":
            return [raw]
        reasoning = sum(choice.reasoning_tokens for choice in self._choices.values())
        if not reasoning:
            return [raw]
        message.summary.usage.reasoning_tokens = reasoning
        return [message.SerializeToString()]

    def _choice(self, index: int) -> "_Choice":
        if index not in self._choices:
            self._choices[index] = _Choice(self._parsing)
        return self._choices[index]


class _Choice:
    def __init__(self, parsing: AnswerParsing) -> None:
        self._reasoning: ReasoningParser | None = None
        self._tokens: _ReasoningTokens | None = None
        if parsing.marks is not None and parsing.start != ReasoningStart.CLOSED:
            opened = parsing.start == ReasoningStart.OPEN
            self._reasoning = ReasoningParser(parsing.marks, opened=opened)
            self._tokens = _ReasoningTokens(parsing.marks.end.encode(), parsing.token_bytes)
        make = parsing.make_call_parser
        self._calls = make() if make is not None else None
        self._max_calls = parsing.max_calls
        self._calls_only = parsing.calls_only
        self._short_ids = parsing.short_ids
        self._num_calls = 0

    @property
    def reasoning_tokens(self) -> int:
        """Tokens up to the mark that ends reasoning; 0 without reasoning."""
        if self._tokens is None or self._reasoning is None or not self._reasoning.reasoned:
            return 0
        return self._tokens.count

    def split_delta(self, delta: inference_pb2.Delta) -> list[inference_pb2.Delta]:
        """One message as one or more messages of one kind of content each."""
        if self._tokens is not None:
            self._tokens.add(delta.token_ids)
        made = self._deltas(delta.choice, self._parse(delta.text))
        if not made:
            made = [inference_pb2.Delta(choice=delta.choice, text="")]
        made[0].token_ids.extend(delta.token_ids)
        made[0].logprobs.extend(delta.logprobs)
        made[0].num_tokens = delta.num_tokens
        return made

    def finish(self, finished: inference_pb2.Finished) -> list[inference_pb2.Delta]:
        """The messages of text that was held back, at the end of the choice."""
        cut = finished.reason in _CUT
        events: list[Event] = []
        for event in self._reasoning.finish(cut=cut) if self._reasoning is not None else ():
            events += self._parse_calls(event)
        if self._calls is not None:
            events += self._without_text(self._calls.finish(cut=cut))
        return self._deltas(finished.choice, joined(events))

    def _parse(self, text: str) -> list[Event]:
        if not text:
            return []
        if self._reasoning is None:
            return self._parse_calls(Text(text))
        events: list[Event] = []
        for event in self._reasoning.feed(text):
            events += self._parse_calls(event)
        return joined(events)

    def _parse_calls(self, event: Event) -> list[Event]:
        if self._calls is None or not isinstance(event, Text):
            return [event]
        return self._without_text(self._calls.feed(event.text))

    def _without_text(self, events: list[Event]) -> list[Event]:
        if not self._calls_only:
            return events
        return [event for event in events if not isinstance(event, Text)]

    def _deltas(self, choice: int, events: list[Event]) -> list[inference_pb2.Delta]:
        made: list[inference_pb2.Delta] = []
        for event in events:
            if isinstance(event, Text):
                made.append(inference_pb2.Delta(choice=choice, text=event.text))
            elif isinstance(event, Reasoning):
                made.append(inference_pb2.Delta(choice=choice, reasoning=event.text))
            elif isinstance(event, CallBegun):
                self._num_calls += 1
                if not self._too_many:
                    made.append(self._call_delta(choice, self._new_id(), event.name))
            elif not self._too_many:
                self._add_arguments(made, choice, event)
        return made

    @property
    def _too_many(self) -> bool:
        return self._max_calls is not None and self._num_calls > self._max_calls

    def _add_arguments(
        self, made: list[inference_pb2.Delta], choice: int, event: CallArguments
    ) -> None:
        if not made or made[-1].WhichOneof("content") != "tool_call":
            made.append(self._call_delta(choice))
        made[-1].tool_call.arguments += event.text

    def _call_delta(self, choice: int, call_id: str = "", name: str = "") -> inference_pb2.Delta:
        call = inference_pb2.ToolCall(id=call_id, name=name, index=self._num_calls - 1)
        return inference_pb2.Delta(choice=choice, tool_call=call)

    def _new_id(self) -> str:
        if self._short_ids:
            return "".join(secrets.choice(_ALPHABET) for _ in range(_SHORT_ID_CHARS))
        return f"call_{secrets.token_hex(12)}"


class _ReasoningTokens:
    """Counts tokens up to a mark by their bytes, independent of the division into messages."""

    def __init__(self, end: bytes, token_bytes: Callable[[int], bytes]) -> None:
        self._end = end
        self._token_bytes = token_bytes
        self._tail: bytes | None = b""
        """The last bytes, in which the mark may have begun; None after the mark."""
        self.count = 0

    def add(self, token_ids: Iterable[int]) -> None:
        """Count these tokens up to the mark."""
        for token_id in token_ids:
            if self._tail is None:
                return
            self.count += 1
            recent = self._tail + self._token_bytes(token_id)
            self._tail = None if self._end in recent else recent[-len(self._end) + 1 :]


def _serialise(deltas: list[inference_pb2.Delta]) -> list[bytes]:
    return [inference_pb2.GenerateResponse(delta=delta).SerializeToString() for delta in deltas]
