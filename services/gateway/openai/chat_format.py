"""/v1/chat/completions: our events as chat.completion(.chunk)."""

from collections.abc import Sequence
from typing import Any

from inferfleet.v1 import inference_pb2
from services.gateway.openai.answer import Header, finish_of
from services.gateway.openai.logprobs import chat_entries, shown
from services.gateway.openai.plan import Plan

CHUNK = "chat.completion.chunk"


class ChatFormat:
    """See answer.Format."""

    def __init__(self, plan: Plan, header: Header, hidden: frozenset[int]) -> None:
        self._plan = plan
        self._header = header
        self._hidden = hidden

    def started(self, prompt: int, event: inference_pb2.Started) -> dict[str, Any] | None:
        del prompt, event
        opening = {"role": "assistant", "content": ""}
        choices = [self._choice(index, dict(opening)) for index in range(self._plan.num_choices)]
        return self._chunk(choices)

    def delta(self, prompt: int, event: inference_pb2.Delta) -> dict[str, Any] | None:
        del prompt
        content: dict[str, Any] = {}
        if event.text:
            content["content"] = event.text
        elif event.reasoning:
            content["reasoning_content"] = event.reasoning
        tokens = shown(event.logprobs, self._hidden)
        if not content and not tokens:
            return None
        choice = self._choice(event.choice, content)
        if self._plan.logprobs:
            choice["logprobs"] = {"content": chat_entries(tokens), "refusal": None}
        return self._chunk([choice])

    def finished(self, prompt: int, event: inference_pb2.Finished) -> dict[str, Any]:
        del prompt
        return self._chunk([{**self._choice(event.choice, {}), **finish_of(event)}])

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
            "content": choice.text,
            "refusal": None,
        }
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        logprobs = None
        if self._plan.logprobs:
            tokens = shown(choice.logprobs, self._hidden)
            logprobs = {"content": chat_entries(tokens), "refusal": None}
        return {
            "index": choice.index,
            "message": message,
            "logprobs": logprobs,
            **finish_of(choice.finished),
        }

    def _choice(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._header.frame(CHUNK, choices)
        if self._plan.include_usage:
            chunk["usage"] = None
        return chunk
