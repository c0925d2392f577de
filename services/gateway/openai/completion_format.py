"""/v1/completions: writes events as text_completion objects.

The index of a choice is prompt × n + choice of the prompt.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from inferfleet_proto.v1 import inference_pb2
from services.gateway.openai.answer_format import Header, finish_of
from services.gateway.openai.logprobs import LegacyLogprobs, shown
from services.gateway.openai.parsed_body import ParsedBody

KIND = "text_completion"


class CompletionFormat:
    """See AnswerFormat. Keeps the length of each choice's text.

    Args:
        hidden: ids of tokens that are left out of log probabilities.
    """

    def __init__(self, body: ParsedBody, header: Header, hidden: frozenset[int]) -> None:
        self._body = body
        self._header = header
        self._hidden = hidden
        self._columns: defaultdict[int, LegacyLogprobs] = defaultdict(LegacyLogprobs)
        # Log probabilities of an echoed prompt, sent with each choice's first text.
        self._prompt_tokens: dict[int, list[inference_pb2.TokenLogprob]] = {}

    def started(self, prompt: int, event: inference_pb2.Started) -> dict[str, Any] | None:
        for choice in range(self._body.num_choices):
            self._prompt_tokens[self._index(prompt, choice)] = list(event.prompt_logprobs)
        return None

    def delta(self, prompt: int, event: inference_pb2.Delta) -> dict[str, Any] | None:
        index = self._index(prompt, event.choice)
        tokens = shown(event.logprobs, self._hidden)
        tokens = self._prompt_tokens.pop(index, []) + tokens
        if not event.text and not tokens:
            return None
        choice = self._choice(index, event.text)
        if self._body.logprobs:
            choice["logprobs"] = self._columns[index].add_tokens(tokens)
        return self._chunk([choice])

    def finished(self, prompt: int, event: inference_pb2.Finished) -> dict[str, Any]:
        choice = self._choice(self._index(prompt, event.choice), "")
        return self._chunk([{**choice, **finish_of(event)}])

    def last(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._header.frame(KIND, []), "usage": usage}

    def whole(
        self, answers: Sequence[inference_pb2.CompleteResponse], usage: dict[str, Any]
    ) -> dict[str, Any]:
        choices = []
        for prompt, answer in enumerate(answers):
            for choice in answer.choices:
                whole = self._choice(self._index(prompt, choice.index), choice.text)
                if self._body.logprobs:
                    tokens = [*answer.prompt_logprobs, *shown(choice.logprobs, self._hidden)]
                    whole["logprobs"] = LegacyLogprobs().add_tokens(tokens)
                choices.append({**whole, **finish_of(choice.finished)})
        return {**self._header.frame(KIND, choices), "usage": usage}

    def _index(self, prompt: int, choice: int) -> int:
        return prompt * self._body.num_choices + choice

    def _choice(self, index: int, text: str) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._header.frame(KIND, choices)
        if self._body.include_usage:
            chunk["usage"] = None
        return chunk
