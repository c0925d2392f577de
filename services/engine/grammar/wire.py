"""Frames between an engine and its grammar compiler."""

import struct
from typing import IO, TypeVar

import msgspec

T = TypeVar("T")
_LENGTH = struct.Struct("<I")

INVALID = "INVALID_ARGUMENT"
TOO_COSTLY = "CONSTRAINT_TOO_COSTLY"
UNAVAILABLE = "COMPILER_UNAVAILABLE"


class Setup(msgspec.Struct, frozen=True):
    """What grammars are compiled for; answered by `Ready`."""

    model: str
    """Path or known name; empty: a token per byte."""
    vocab_size: int
    """Width of the logits."""
    eos_token_ids: list[int]
    """All tokens that may end a complete answer."""
    memory_bytes: int
    """What one compilation may take beyond the idle process."""


class Ready(msgspec.Struct, frozen=True):
    """The compiler takes jobs."""

    vocabulary: list[bytes]
    """The bytes of each id; none for one that is never part of a text."""
    broken: list[int] = []
    """Ids whose bytes no UTF-8 has; see `utf8`."""
    pending: dict[int, list[int]] = {}
    """By its last byte, ids that leave a character begun which not every byte can go on with."""
    breaking: dict[int, list[int]] = {}
    """By the same byte, ids that cannot come next."""


class Job(msgspec.Struct, frozen=True):
    number: int
    kind: str
    text: str
    choices: tuple[str, ...] = ()


class Outcome(msgspec.Struct, frozen=True):
    """`grammar` (serialised) or `problem`."""

    number: int
    grammar: str | None = None
    problem: str | None = None
    reason: str = INVALID
    """With a problem: INVALID, TOO_COSTLY or UNAVAILABLE."""


def write_frame(stream: IO[bytes], message: msgspec.Struct) -> None:
    """Write one frame and flush."""
    body = msgspec.msgpack.encode(message)
    stream.write(_LENGTH.pack(len(body)) + body)
    stream.flush()


def read_frame(stream: IO[bytes], kind: type[T]) -> T | None:
    """Read one frame; None at the end of the stream, also in the middle of a frame."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    body = stream.read(length)
    return msgspec.msgpack.decode(body, type=kind) if len(body) == length else None
