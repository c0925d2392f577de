"""/v1/chat/completions: writes events as chat.completion and chat.completion.chunk objects."""

from collections.abc import Sequence
from typing import Any

from inferfleet_proto.v1 import inference_pb2
from services.gateway.openai.answer_format import Header, finish_of
from services.gateway.openai.logprobs import chat_entries, shown
from services.gateway.openai.parsed_body import ParsedBody

CHUNK = "chat.completion.chunk"


class ChatFormat:
    """See AnswerFormat.

    Args:
        hidden: ids of tokens that are left out of log probabilities.
    """

    def __init__(self, body: ParsedBody, header: Header, hidden: frozenset[int]) -> None:
        self._body = body
        self._header = header
        self._hidden = hidden
        self._calling: set[int] = set()

    def started(self, prompt: int, event: inference_pb2.Started) -> dict[str, Any] | None:
        del prompt, event
        opening = {"role": "assistant", "content": ""}
        choices = [self._choice(index, dict(opening)) for index in range(self._body.num_choices)]
        return self._chunk(choices)

    def delta(self, prompt: int, event: inference_pb2.Delta) -> dict[str, Any] | None:
        del prompt
        content: dict[str, Any] = {}
        if event.text:
            content["content"] = event.text
        elif event.reasoning:
            content["reasoning_content"] = event.reasoning
        elif event.WhichOneof("content") == "tool_call":
            self._calling.add(event.choice)
            content["tool_calls"] = [_call_delta(event.tool_call)]
        tokens = shown(event.logprobs, self._hidden)
        if not content and not tokens:
            return None
        choice = self._choice(event.choice, content)
        if self._body.logprobs:
            choice["logprobs"] = {"content": chat_entries(tokens), "refusal": None}
        return self._chunk([choice])

    def finished(self, prompt: int, event: inference_pb2.Finished) -> dict[str, Any]:
        del prompt
        complete = self._complete_reason(event.choice in self._calling)
        return self._chunk([{**self._choice(event.choice, {}), **finish_of(event, complete)}])

    def last(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._header.frame(CHUNK, []), "usage": usage}

    def whole(
        self, answers: Sequence[inference_pb2.CompleteResponse], usage: dict[str, Any]
    ) -> dict[str, Any]:
        choices = [self._whole_choice(choice) for choice in answers[0].choices]
        return {**self._header.frame("chat.completion", choices), "usage": usage}

    def _whole_choice(self, choice: inference_pb2.Choice) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": choice.text or (None if choice.tool_calls else ""),
            "refusal": None,
        }
        if choice.tool_calls:
            message["tool_calls"] = [_call(call) for call in choice.tool_calls]
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        logprobs = None
        if self._body.logprobs:
            tokens = shown(choice.logprobs, self._hidden)
            logprobs = {"content": chat_entries(tokens), "refusal": None}
        return {
            "index": choice.index,
            "message": message,
            "logprobs": logprobs,
            **finish_of(choice.finished, self._complete_reason(bool(choice.tool_calls))),
        }

    def _complete_reason(self, calling: bool) -> str:
        """As OpenAI: `stop` for a call whose function the request named, else `tool_calls`."""
        named = inference_pb2.ToolChoice.MODE_NAMED
        mode = self._body.requests[0].chat.tool_choice.mode
        return "tool_calls" if calling and mode != named else "stop"

    def _choice(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._header.frame(CHUNK, choices)
        if self._body.include_usage:
            chunk["usage"] = None
        return chunk


def _call(call: inference_pb2.ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _call_delta(call: inference_pb2.ToolCall) -> dict[str, Any]:
    """A piece of a call; only the first one has id, type and name."""
    if call.id:
        return {"index": call.index, **_call(call)}
    return {"index": call.index, "function": {"arguments": call.arguments}}
