"""Deltas of one choice that are there at the same time, made one message.

What a message costs its reader and the hop before it does not depend on how long it is.
"""

from collections.abc import Sequence

from inferfleet.v1 import inference_pb2


def joined(messages: Sequence[bytes]) -> Sequence[bytes]:
    """The same stream in as few messages; what is no delta stays, and stays in its place."""
    if len(messages) < 2:
        return messages
    out: list[bytes] = []
    growing: inference_pb2.GenerateResponse | None = None
    for message in messages:
        if message[:1] != b"\x12":
            if growing is not None:
                out.append(growing.SerializeToString())
                growing = None
            out.append(message)
            continue
        parsed = inference_pb2.GenerateResponse.FromString(message)
        if growing is not None and _joins(growing.delta, parsed.delta):
            _add(growing.delta, parsed.delta)
            continue
        if growing is not None:
            out.append(growing.SerializeToString())
        growing = parsed
    if growing is not None:
        out.append(growing.SerializeToString())
    return out


def _joins(first: inference_pb2.Delta, second: inference_pb2.Delta) -> bool:
    """Pieces of calls stay apart: each has an index and a name of its own."""
    if first.choice != second.choice:
        return False
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
