"""The messages of one stream, with the text of each choice taken apart.

Stands after whatever carries a broken stream on: it sees each piece of text once, whoever made it.
A message's token ids and log probabilities go out with the first message made of it, at once, also
while all of its text is held back.
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
from services.gateway.answers.reasoning import Marks, ReasoningParser

_ALPHABET = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Reading:
    """How the answers of one request are read."""

    marks: Marks | None
    """Around reasoning; None: there is none."""
    thinking: str
    """As in `constrain`."""
    calls: Callable[[], Parser] | None
    """Makes a parser of calls; None: they stay text."""
    most_calls: int | None
    """Further ones are dropped."""
    token_bytes: Callable[[int], bytes]
    short_ids: bool = False
    """Ids of 9 characters, the only ones that Mistral's templates take back."""

    def stream(self) -> "AnswerStream":
        """For the messages of one request."""
        return AnswerStream(self)


class AnswerStream:
    """Owned by who forwards the stream."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._choices: dict[int, _Choice] = {}

    def take(self, raw: bytes) -> list[bytes]:
        """What to send on for a serialised GenerateResponse."""
        message = inference_pb2.GenerateResponse.FromString(raw)
        event = message.WhichOneof("event")
        if event == "delta":
            return _written(self._choice(message.delta.choice).delta(message.delta))
        if event == "finished":
            choice = self._choice(message.finished.choice)
            return [*_written(choice.last(message.finished.choice)), raw]
        if event != "summary":
            return [raw]
        reasoning = sum(choice.reasoning_tokens for choice in self._choices.values())
        if not reasoning:
            return [raw]
        message.summary.usage.reasoning_tokens = reasoning
        return [message.SerializeToString()]

    def _choice(self, index: int) -> "_Choice":
        if index not in self._choices:
            self._choices[index] = _Choice(self._reading)
        return self._choices[index]


class _Choice:
    def __init__(self, reading: Reading) -> None:
        self._reasoning: ReasoningParser | None = None
        self._tokens: _ReasoningTokens | None = None
        if reading.marks is not None and reading.thinking != "closed":
            self._reasoning = ReasoningParser(reading.marks, opened=reading.thinking == "open")
            self._tokens = _ReasoningTokens(reading.marks.end.encode(), reading.token_bytes)
        self._calls = reading.calls() if reading.calls is not None else None
        self._most_calls = reading.most_calls
        self._short_ids = reading.short_ids
        self._num_calls = 0

    @property
    def reasoning_tokens(self) -> int:
        """Up to the mark that ended it; 0 without reasoning."""
        if self._tokens is None or self._reasoning is None or not self._reasoning.reasoned:
            return 0
        return self._tokens.count

    def delta(self, delta: inference_pb2.Delta) -> list[inference_pb2.Delta]:
        """One message as those that it becomes."""
        if self._tokens is not None:
            self._tokens.take(delta.token_ids)
        made = self._messages(delta.choice, self._read(delta.text))
        if not made:
            made = [inference_pb2.Delta(choice=delta.choice, text="")]
        made[0].token_ids.extend(delta.token_ids)
        made[0].logprobs.extend(delta.logprobs)
        made[0].num_tokens = delta.num_tokens
        return made

    def last(self, choice: int) -> list[inference_pb2.Delta]:
        """What was held back, now that no text comes any more."""
        events: list[Event] = []
        for event in self._reasoning.finish() if self._reasoning is not None else ():
            events += self._called(event)
        if self._calls is not None:
            events += self._calls.finish()
        return self._messages(choice, joined(events))

    def _read(self, text: str) -> list[Event]:
        if not text:
            return []
        if self._reasoning is None:
            return self._called(Text(text))
        return joined(e for event in self._reasoning.feed(text) for e in self._called(event))

    def _called(self, event: Event) -> list[Event]:
        if self._calls is None or not isinstance(event, Text):
            return [event]
        return self._calls.feed(event.text)

    def _messages(self, choice: int, events: list[Event]) -> list[inference_pb2.Delta]:
        made: list[inference_pb2.Delta] = []
        for event in events:
            if isinstance(event, Text):
                made.append(inference_pb2.Delta(choice=choice, text=event.text))
            elif isinstance(event, Reasoning):
                made.append(inference_pb2.Delta(choice=choice, reasoning=event.text))
            elif isinstance(event, CallBegun):
                self._num_calls += 1
                if not self._too_many:
                    made.append(self._call(choice, self._new_id(), event.name))
            elif not self._too_many:
                self._add_arguments(made, choice, event)
        return made

    @property
    def _too_many(self) -> bool:
        return self._most_calls is not None and self._num_calls > self._most_calls

    def _add_arguments(
        self, made: list[inference_pb2.Delta], choice: int, event: CallArguments
    ) -> None:
        if not made or made[-1].WhichOneof("content") != "tool_call":
            made.append(self._call(choice))
        made[-1].tool_call.arguments += event.text

    def _call(self, choice: int, call_id: str = "", name: str = "") -> inference_pb2.Delta:
        call = inference_pb2.ToolCall(id=call_id, name=name, index=self._num_calls - 1)
        return inference_pb2.Delta(choice=choice, tool_call=call)

    def _new_id(self) -> str:
        if self._short_ids:
            return "".join(secrets.choice(_ALPHABET) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


class _ReasoningTokens:
    """Counts tokens up to a mark, by their bytes: how they are grouped into messages is nothing to
    it."""

    def __init__(self, end: bytes, token_bytes: Callable[[int], bytes]) -> None:
        self._end = end
        self._token_bytes = token_bytes
        self._tail: bytes | None = b""
        self.count = 0

    def take(self, token_ids: Iterable[int]) -> None:
        """Go on with these."""
        for token_id in token_ids:
            if self._tail is None:
                return
            self.count += 1
            seen = self._tail + self._token_bytes(token_id)
            self._tail = None if self._end in seen else seen[-len(self._end) + 1 :]


def _written(deltas: list[inference_pb2.Delta]) -> list[bytes]:
    return [inference_pb2.GenerateResponse(delta=delta).SerializeToString() for delta in deltas]
