"""The channel between rank 0 and another rank: msgpack frames over a socket pair, in order."""

import socket
import struct
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")
_LENGTH = struct.Struct("<I")


class ChannelClosedError(Exception):
    """The other end was closed."""


class Channel(Generic[T]):
    """One end of a channel; all calls block."""

    def __init__(self, sock: socket.socket, receives: Any) -> None:
        """
        Args:
            receives: union of the messages that the other end sends.
        """
        self._sock = sock
        self._file = sock.makefile("rb")
        self._decoder = msgspec.msgpack.Decoder(receives)

    def send(self, message: msgspec.Struct) -> None:
        """Write one message.

        Raises:
            ChannelClosedError: the other end was closed.
        """
        payload = msgspec.msgpack.encode(message)
        try:
            self._sock.sendall(_LENGTH.pack(len(payload)) + payload)
        except OSError as error:
            raise ChannelClosedError from error

    def next(self) -> T:
        """Wait for one message.

        Raises:
            ChannelClosedError: the other end was closed.
        """
        try:
            head = self._file.read(_LENGTH.size)
            payload = self._file.read(*_LENGTH.unpack(head)) if len(head) == _LENGTH.size else b""
        except OSError as error:
            raise ChannelClosedError from error
        if not payload:
            raise ChannelClosedError
        message: T = self._decoder.decode(payload)
        return message

    def close(self) -> None:
        """Close this end; the other end then gets ChannelClosedError. Idempotent."""
        self._file.close()
        self._sock.close()
