"""A TCP proxy before one service that can be cut: connections reset, or silent both ways."""

import asyncio
import contextlib
import socket
import struct

_CHUNK = 65536


class Proxy:
    """Forwards to `target` until `reset` or `silence`."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._server: asyncio.Server | None = None
        self._links: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = asyncio.Event()
        self._open.set()
        self._refusing = False
        self.address = ""

    async def start(self) -> str:
        """Listen; returns host:port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self.address

    async def stop(self) -> None:
        """End all; idempotent."""
        if self._server is not None:
            self._server.close()
        self._open.set()
        self._reset_all()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def reset(self) -> None:
        """Cut every connection with RST and refuse new ones until `heal`."""
        self._refusing = True
        self._reset_all()

    def silence(self) -> None:
        """Pass nothing on, in either direction; connections stay open, as with a lost cable."""
        self._open.clear()

    def heal(self) -> None:
        """Forward again; what was held back is lost with its connections."""
        if not self._open.is_set():
            self._reset_all()
        self._refusing = False
        self._open.set()

    def _reset_all(self) -> None:
        for link in list(self._links):
            sock = link.get_extra_info("socket")
            with contextlib.suppress(OSError):
                # Linger 0: RST, not FIN.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            link.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._links.add(writer)
        other: asyncio.StreamWriter | None = None
        try:
            if self._refusing:
                return
            far_reader, other = await asyncio.open_connection(*self._target)
            self._links.add(other)
            pumps = {
                asyncio.create_task(self._pump(reader, other)),
                asyncio.create_task(self._pump(far_reader, writer)),
            }
            self._tasks |= pumps
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pump in pumps:
                pump.cancel()
            await asyncio.wait(pumps)
            self._tasks -= pumps
        except OSError:
            pass  # the service is away: so is its proxy
        finally:
            for link in (writer, other):
                if link is not None:
                    self._links.discard(link)
                    link.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
