"""What rank 0 tells the other ranks, and how they answer: msgpack frames over a socket pair.

A rank runs commands in their order, so what comes after `ApplyNext` uses the new map on all ranks.
"""

import socket
import struct

import msgspec

from services.engine.config import EngineConfig
from services.engine.runner import ExpertPlacement, ExpertShape

_LENGTH = struct.Struct("<I")


class Join(msgspec.Struct, tag=True, frozen=True):
    """The first command: load the experts of a rank and join the group."""

    config: EngineConfig
    shape: ExpertShape
    placement: ExpertPlacement
    rank: int
    store_path: str


class RunRound(msgspec.Struct, tag=True, frozen=True):
    """Serve the experts of all layers once."""


class BeginPlacement(msgspec.Struct, tag=True, frozen=True):
    """Prepare this map from now on; it was checked."""

    placement: ExpertPlacement


class PrepareNext(msgspec.Struct, tag=True, frozen=True):
    """Load one more expert of the map that was begun."""


class ApplyNext(msgspec.Struct, tag=True, frozen=True):
    """Use the map that was prepared."""


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """The first answer: the experts are in memory."""

    weights_bytes: int


class Joined(msgspec.Struct, tag=True, frozen=True):
    """The second and last answer: all ranks have met, and this one needs the store no more."""


class LoadFailed(msgspec.Struct, tag=True, frozen=True):
    """The first and only answer of a rank that cannot serve."""

    message: str


Command = Join | RunRound | BeginPlacement | PrepareNext | ApplyNext
Answer = Loaded | LoadFailed | Joined

_commands = msgspec.msgpack.Decoder(Command)
_answers = msgspec.msgpack.Decoder(Answer)


class ChannelClosedError(Exception):
    """The other end is gone."""


class Channel:
    """One end of the line between rank 0 and another rank; blocking."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._file = sock.makefile("rb")

    def send(self, message: Command | Answer) -> None:
        """Write one message.

        Raises:
            ChannelClosedError: the other end is gone.
        """
        payload = msgspec.msgpack.encode(message)
        try:
            self._sock.sendall(_LENGTH.pack(len(payload)) + payload)
        except OSError as error:
            raise ChannelClosedError from error

    def next_command(self) -> Command:
        """Wait for one; raises ChannelClosedError."""
        return _commands.decode(self._read())

    def next_answer(self) -> Answer:
        """Wait for one; raises ChannelClosedError."""
        return _answers.decode(self._read())

    def close(self) -> None:
        """Idempotent; the other end reads the end of the stream."""
        self._file.close()
        self._sock.close()

    def _read(self) -> bytes:
        try:
            head = self._file.read(_LENGTH.size)
            payload = self._file.read(*_LENGTH.unpack(head)) if len(head) == _LENGTH.size else b""
        except OSError as error:
            raise ChannelClosedError from error
        if not payload:
            raise ChannelClosedError
        return payload
