"""The messages between an engine and its grammar compiler, and their framing."""

import struct
from typing import IO, TypeVar

import msgspec

T = TypeVar("T")
_LENGTH = struct.Struct("<I")

# Models like to indent; without a limit a grammar lets them produce blanks until max_tokens.
MAX_WHITESPACE = 8
INVALID = "INVALID_ARGUMENT"
TOO_COSTLY = "CONSTRAINT_TOO_COSTLY"
UNAVAILABLE = "COMPILER_UNAVAILABLE"


class Setup(msgspec.Struct, frozen=True):
    """The vocabulary and limits to compile for; the compiler answers with `Ready`."""

    model: str
    """Path or known name of the model; empty: one token per byte."""
    vocab_size: int
    """Width of the logits."""
    eos_token_ids: list[int]
    """All tokens that can end a complete answer."""
    memory_bytes: int
    """Memory that one compilation may take in addition to the idle process."""


class Ready(msgspec.Struct, frozen=True):
    """The compiler is ready for jobs."""

    vocabulary: list[bytes]
    """The bytes of each token id; empty for a token that is never part of the text."""
    broken: list[int] = []
    """Ids with bytes of no valid UTF-8; see `utf8.broken_tokens`."""
    pending: dict[int, list[int]] = {}
    """By lead byte, ids of the tokens that end in it; see `utf8.pending_tokens`."""
    breaking: dict[int, list[int]] = {}
    """By lead byte, ids of the tokens that must not follow; see `utf8.breaking_tokens`."""


class Job(msgspec.Struct, frozen=True):
    """One constraint to compile."""

    number: int
    kind: str
    text: str
    choices: tuple[str, ...] = ()


class Outcome(msgspec.Struct, frozen=True):
    """The result of a job: a serialized `grammar`, or a `problem`."""

    number: int
    grammar: str | None = None
    problem: str | None = None
    reason: str = INVALID
    """With a problem: INVALID, TOO_COSTLY or UNAVAILABLE."""
    backend: str = "xgrammar"
    """The engine that `grammar` is for."""


def write_frame(stream: IO[bytes], message: msgspec.Struct) -> None:
    """Write one frame and flush."""
    body = msgspec.msgpack.encode(message)
    stream.write(_LENGTH.pack(len(body)) + body)
    stream.flush()


def read_frame(stream: IO[bytes], kind: type[T]) -> T | None:
    """Read one frame; None at the end of the stream, even within a frame."""
    head = stream.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    body = stream.read(length)
    return msgspec.msgpack.decode(body, type=kind) if len(body) == length else None
