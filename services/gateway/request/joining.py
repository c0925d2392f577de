"""Deltas that are there at the same time, made one message a choice.

What a message costs its reader and the hop before it does not depend on how long it is.
"""

from collections.abc import Sequence

from inferfleet_proto.v1 import inference_pb2

_DELTA = b"\x12"
"""A GenerateResponse that is a delta begins with it."""


def joined(messages: Sequence[bytes]) -> Sequence[bytes]:
    """The same stream in as few messages.

    Deltas of one choice keep their order, and none passes a message that is no delta.
    """
    if len(messages) < 2:
        return messages
    out: list[bytes] = []
    growing: dict[int, inference_pb2.GenerateResponse] = {}
    for message in messages:
        if message[:1] != _DELTA:
            _flush(growing, out)
            out.append(message)
            continue
        parsed = inference_pb2.GenerateResponse.FromString(message)
        choice = parsed.delta.choice
        before = growing.get(choice)
        if before is not None and _joins(before.delta, parsed.delta):
            _add(before.delta, parsed.delta)
            continue
        if before is not None:
            _flush(growing, out)
        growing[choice] = parsed
    _flush(growing, out)
    return out


def _flush(growing: dict[int, inference_pb2.GenerateResponse], out: list[bytes]) -> None:
    out.extend(message.SerializeToString() for message in growing.values())
    growing.clear()


def _joins(first: inference_pb2.Delta, second: inference_pb2.Delta) -> bool:
    """Pieces of calls stay apart: each has an index and a name of its own."""
    kinds = {first.WhichOneof("content"), second.WhichOneof("content")} - {None}
    return "tool_call" not in kinds and len(kinds) < 2


def _add(first: inference_pb2.Delta, second: inference_pb2.Delta) -> None:
    text, reasoning = first.text + second.text, first.reasoning + second.reasoning
    num_tokens = first.num_tokens + second.num_tokens
    first.MergeFrom(second)
    first.num_tokens = num_tokens
    if text:
        first.text = text
    elif reasoning:
        first.reasoning = reasoning
