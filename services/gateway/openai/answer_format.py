"""What the answers of both endpoints share: usage, finish reasons, and the frame of an object."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from inferfleet_proto.v1 import inference_pb2
from services.gateway.metrics import reason_name

_FINISH = {"MAX_TOKENS": "length", "CONTEXT_FULL": "length"}


@dataclass(frozen=True)
class Header:
    """The fields that every object of one answer repeats."""

    id: str
    created: int
    model: str
    fingerprint: str | None

    def frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """An object of this kind with these choices."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }


class AnswerFormat(Protocol):
    """The JSON of one endpoint's answers. `prompt` is the index of a prompt in the body."""

    def started(self, prompt: int, event: inference_pb2.Started) -> dict[str, Any] | None:
        """The chunk for Started; None for none."""

    def delta(self, prompt: int, event: inference_pb2.Delta) -> dict[str, Any] | None:
        """The chunk for a Delta; None for none."""

    def finished(self, prompt: int, event: inference_pb2.Finished) -> dict[str, Any]:
        """The chunk for the end of a choice."""

    def last(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last chunk, with the usage of all prompts."""

    def whole(
        self, answers: Sequence[inference_pb2.CompleteResponse], usage: dict[str, Any]
    ) -> dict[str, Any]:
        """The answer that is not streamed: all prompts in one object."""


def finish_of(event: inference_pb2.Finished, complete: str = "stop") -> dict[str, Any]:
    """finish_reason, and stop_reason: the stop string or token that matched.

    Args:
        complete: the finish_reason of an answer that was not cut.
    """
    matched = event.WhichOneof("matched")
    return {
        "finish_reason": _FINISH.get(reason_name(event.reason), complete),
        "stop_reason": getattr(event, matched) if matched else None,
    }


def usage_of(usages: Iterable[inference_pb2.Usage]) -> dict[str, Any]:
    """The usage of all prompts of a body, added up."""
    prompt = completion = cached = reasoning = 0
    for usage in usages:
        prompt += usage.prompt_tokens
        completion += usage.completion_tokens
        cached += usage.cached_tokens
        reasoning += usage.reasoning_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }
