"""The connection between front and core: batches of messages over a socket pair.

A frame is a little-endian u32 length and one msgpack list. `CoreLink`, the front's end, is asyncio
and owns the core's process. `CoreEnd`, the core's end, blocks with a timeout; `wake` ends the wait.
"""

import asyncio
import contextlib
import dataclasses
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence

import msgspec

from services.engine.contract.config import EngineConfig
from services.engine.contract.messages import (
    CoreFailed,
    CoreReady,
    RoundReport,
    Shutdown,
    StartCore,
    ToCore,
    ToFront,
)

_LENGTH = struct.Struct("<I")
_READ_BYTES = 1 << 18
_to_core = msgspec.msgpack.Decoder(list[ToCore])
_to_front = msgspec.msgpack.Decoder(list[ToFront])
_encoder = msgspec.msgpack.Encoder()


class CoreDiedError(Exception):
    """The core has failed; the message gives the reason, as far as it is known."""


class LinkClosedError(Exception):
    """The other end has closed the connection."""


def _frame(messages: Sequence[ToCore] | Sequence[ToFront]) -> bytes:
    payload = _encoder.encode(messages)
    return _LENGTH.pack(len(payload)) + payload


def engine_config(config: EngineConfig) -> EngineConfig:
    """The core's settings, out of a configuration that may have the front's as well."""
    names = [field.name for field in dataclasses.fields(EngineConfig)]
    return EngineConfig(**{name: getattr(config, name) for name in names})


class CoreLink:
    """The front's end. Call `start` once; `stop` is idempotent and safe after a failed start."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._stopping = False
        self._loaded = False

    @property
    def pid(self) -> int | None:
        """Process id of the core; None before it is spawned."""
        return self._process.pid if self._process else None

    def spawn(self, config: EngineConfig) -> None:
        """Let a core begin to load its model; `start` waits for it.

        It needs no event loop, so that a core can load while the front still imports. The kernel
        kills the core when the calling thread ends.
        """
        self._sock, theirs = socket.socketpair()
        with theirs:
            self._process = _spawn(theirs)
        with contextlib.suppress(OSError):  # it has ended already: `start` says how
            self._sock.sendall(_frame([StartCore(config=engine_config(config))]))

    async def start(self, config: EngineConfig) -> CoreReady:
        """Wait until a core has loaded its model; spawns it if `spawn` did not.

        Raises:
            CoreDiedError: the core refused its configuration or ended before it was ready.
        """
        if self._process is None:
            self.spawn(config)
        self._reader, self._writer = await asyncio.open_connection(
            sock=self._sock, limit=_READ_BYTES
        )
        for message in await self._receive():
            if isinstance(message, CoreReady):
                self._loaded = True
                return message
            if isinstance(message, CoreFailed):
                raise CoreDiedError(message.message)
        raise CoreDiedError("the core sent a report before CoreReady")

    def send(self, messages: Sequence[ToCore]) -> None:
        """Send a batch in order; buffered, never blocks. It is lost if the core has ended."""
        if self._writer is not None and messages and not self._writer.is_closing():
            self._writer.write(_frame(messages))

    async def __aiter__(self) -> AsyncIterator[RoundReport]:
        """Reports in order; ends after `stop`.

        Raises:
            CoreDiedError: the core ended without `stop`.
        """
        while True:
            try:
                messages = await self._receive()
            except CoreDiedError:
                if self._stopping:
                    return
                raise
            for message in messages:
                if isinstance(message, RoundReport):
                    yield message
                elif isinstance(message, CoreFailed):
                    raise CoreDiedError(message.message)

    async def stop(self, grace_s: float = 5.0) -> None:
        """Let the core end after its running round; kill it after `grace_s` seconds.

        A core that still loads its model is killed at once: it has nothing to end.
        """
        self._stopping = True
        if self._process is not None and not self._loaded:
            self._process.kill()
        self.send([Shutdown()])
        if self._process is not None:
            await asyncio.to_thread(_reap, self._process, grace_s)
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    async def _receive(self) -> list[ToFront]:
        assert self._reader is not None, "not started"
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            return _to_front.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise CoreDiedError(await self._death_reason()) from error

    async def _death_reason(self) -> str:
        if self._process is None:
            return "the core is not running"
        status = await asyncio.to_thread(_reap, self._process, 1.0)
        if status < 0:
            return f"the core was killed by {signal.Signals(-status).name}"
        return f"the core ended with status {status}"


def _spawn(end: socket.socket) -> "subprocess.Popen[bytes]":
    """Start the core on the calling thread; the kernel kills the core when that thread ends."""
    return subprocess.Popen(
        [sys.executable, "-m", "services.engine.core.process", "--fd", str(end.fileno())],
        pass_fds=[end.fileno()],
        stdin=subprocess.DEVNULL,
    )


def _reap(process: "subprocess.Popen[bytes]", grace_s: float) -> int:
    try:
        return process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


class CoreEnd:
    """The core's end. The core's main thread uses it; any thread may call `wake`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sock.setblocking(True)
        self._buffer = bytearray()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)

    def wake(self) -> None:
        """End the `poll` that is waiting, or the next one."""
        # A full pipe has a wake-up pending already; a closed one has no reader.
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"\0")

    def poll(self, timeout_s: float | None) -> list[ToCore]:
        """Messages that have arrived; waits for one, for a wake-up or for the timeout.

        Args:
            timeout_s: None waits without a limit.

        Raises:
            LinkClosedError: the front has closed the connection.
        """
        messages: list[ToCore] = []
        for key, _ in self._selector.select(timeout_s):
            if key.fd == self._wake_read:
                os.read(self._wake_read, 4096)
            else:
                messages.extend(self._read())
        return messages

    def send(self, messages: Sequence[ToFront]) -> None:
        """Write one frame; blocks while the front does not read.

        Raises:
            LinkClosedError: the front has closed the connection.
        """
        try:
            self._sock.sendall(_frame(messages))
        except OSError as error:
            raise LinkClosedError("the front has closed the connection") from error

    def close(self) -> None:
        """Close the descriptors; idempotent."""
        if self._wake_read >= 0:
            self._selector.close()
            self._sock.close()
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._wake_read = self._wake_write = -1

    def _read(self) -> list[ToCore]:
        try:
            data = self._sock.recv(_READ_BYTES)
        except OSError as error:
            raise LinkClosedError("the front has closed the connection") from error
        if not data:
            raise LinkClosedError("the front has closed the connection")
        self._buffer += data
        messages: list[ToCore] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            messages.extend(_to_core.decode(bytes(self._buffer[_LENGTH.size : end])))
            del self._buffer[:end]
        return messages
