"""Collects the messages of one stream into the single answer of a Complete call."""

from inferfleet_proto.v1 import inference_pb2
from services.common.errors import AbortedError


class _ChoiceParts:
    """The parts of one choice; its text is joined once, at the end."""

    def __init__(self, index: int) -> None:
        self.choice = inference_pb2.Choice(index=index)
        self._text: list[str] = []
        self._reasoning: list[str] = []

    def add(self, delta: inference_pb2.Delta) -> None:
        kind = delta.WhichOneof("content")
        if kind == "text":
            self._text.append(delta.text)
        elif kind == "reasoning":
            self._reasoning.append(delta.reasoning)
        elif kind == "tool_call":
            self._add_call(delta.tool_call)
        self.choice.token_ids.extend(delta.token_ids)
        self.choice.logprobs.extend(delta.logprobs)

    def finish(self) -> inference_pb2.Choice:
        self.choice.text = "".join(self._text)
        self.choice.reasoning = "".join(self._reasoning)
        return self.choice

    def _add_call(self, part: inference_pb2.ToolCall) -> None:
        for call in self.choice.tool_calls:
            if call.index == part.index:
                call.arguments += part.arguments
                return
        self.choice.tool_calls.add().CopyFrom(part)


class AnswerCollector:
    """Builds a CompleteResponse from the GenerateResponse messages of one stream."""

    def __init__(self) -> None:
        self._answer = inference_pb2.CompleteResponse()
        self._parts: dict[int, _ChoiceParts] = {}

    def add_serialized(self, raw: bytes) -> None:
        """Add the next message, given as a serialized GenerateResponse."""
        self.add(inference_pb2.GenerateResponse.FromString(raw))

    def add(self, message: inference_pb2.GenerateResponse) -> None:
        """Add the next message."""
        event = message.WhichOneof("event")
        if event == "delta":
            self._part(message.delta.choice).add(message.delta)
        elif event == "finished":
            self._part(message.finished.choice).choice.finished.CopyFrom(message.finished)
        elif event == "started":
            _copy_started(self._answer, message.started)
        elif event == "summary":
            self._answer.summary.CopyFrom(message.summary)

    def answer(self) -> inference_pb2.CompleteResponse:
        """Return the answer. Call it once, after the last message.

        Raises:
            AbortedError: a choice is not finished.
        """
        if any(not part.choice.HasField("finished") for part in self._parts.values()):
            raise AbortedError("the stream ended before all choices were finished")
        self._answer.choices.extend(self._parts[i].finish() for i in sorted(self._parts))
        return self._answer

    def _part(self, index: int) -> _ChoiceParts:
        if index not in self._parts:
            self._parts[index] = _ChoiceParts(index)
        return self._parts[index]


def _copy_started(answer: inference_pb2.CompleteResponse, started: inference_pb2.Started) -> None:
    answer.request_id = started.request_id
    answer.model = started.model
    answer.model_revision = started.model_revision
    answer.seed = started.seed
    answer.prompt_logprobs.extend(started.prompt_logprobs)
