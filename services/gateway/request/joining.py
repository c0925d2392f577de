"""Merges deltas that arrive at the same time into one message per choice.

The cost of a message to its reader and to the hop before it does not depend on its length.
"""

from collections.abc import Sequence

from inferfleet_proto.v1 import inference_pb2
from services.gateway.message_tags import DELTA_TAG


def join_deltas(messages: Sequence[bytes]) -> Sequence[bytes]:
    """The same events in fewer messages.

    Deltas of one choice keep their order, and none is moved past a message that is not a delta.
    """
    if len(messages) < 2:
        return messages
    out: list[bytes] = []
    growing: dict[int, inference_pb2.GenerateResponse] = {}
    for message in messages:
        if message[:1] != DELTA_TAG:
            _flush(growing, out)
            out.append(message)
            continue
        parsed = inference_pb2.GenerateResponse.FromString(message)
        choice = parsed.delta.choice
        before = growing.get(choice)
        if before is not None and _can_join(before.delta, parsed.delta):
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


def _can_join(first: inference_pb2.Delta, second: inference_pb2.Delta) -> bool:
    """Whether two deltas can be one; pieces of tool calls cannot, as each has its own index."""
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
