"""What both endpoints' answers share: usage, finish reasons, and the frame of each object."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from inferfleet_proto.v1 import inference_pb2
from services.gateway.metrics import reason_name

_FINISH = {"MAX_TOKENS": "length", "CONTEXT_FULL": "length"}


@dataclass(frozen=True)
class Header:
    """What every object of one answer repeats."""

    id: str
    created: int
    model: str
    fingerprint: str | None

    def frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """The object around some choices."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
            "choices": choices,
        }


class Format(Protocol):
    """How one endpoint writes an answer. `prompt` counts the prompts of one body."""

    def started(self, prompt: int, event: inference_pb2.Started) -> dict[str, Any] | None: ...

    def delta(self, prompt: int, event: inference_pb2.Delta) -> dict[str, Any] | None: ...

    def finished(self, prompt: int, event: inference_pb2.Finished) -> dict[str, Any]: ...

    def last(self, usage: dict[str, Any]) -> dict[str, Any]: ...

    def whole(
        self, answers: Sequence[inference_pb2.CompleteResponse], usage: dict[str, Any]
    ) -> dict[str, Any]: ...


def finish_of(event: inference_pb2.Finished, whole: str = "stop") -> dict[str, Any]:
    """finish_reason, and what matched if something did.

    Args:
        whole: the reason of an answer that was not cut.
    """
    matched = event.WhichOneof("matched")
    return {
        "finish_reason": _FINISH.get(reason_name(event.reason), whole),
        "stop_reason": getattr(event, matched) if matched else None,
    }


def usage_of(usages: Iterable[inference_pb2.Usage]) -> dict[str, Any]:
    """The usage of all prompts of a body together."""
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
