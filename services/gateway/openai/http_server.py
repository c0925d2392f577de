"""uvicorn inside the gateway's own loop: no signal handlers, no logs, a port of our choice."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from services.common.config import ConfigError

KEEP_ALIVE_S = 75
BACKLOG = 2048


class _Embedded(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the process's signals belong to lifecycle.run

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.ready.set()


class HttpServer:
    """Serves one ASGI application.

    Args:
        app: the application.
        cert_file, key_file: serve HTTPS with these; empty for HTTP.

    Raises:
        ConfigError: the two files are no certificate and its key.
    """

    def __init__(self, app: ASGIApp, *, cert_file: str = "", key_file: str = "") -> None:
        if cert_file:
            _check_pair(cert_file, key_file)
        self._server = _Embedded(
            uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                ssl_certfile=cert_file or None,
                ssl_keyfile=key_file or None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> str:
        """Listen and return host:port.

        Raises:
            ConfigError: the port cannot be had.
        """
        listener = _listen(host, port)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name="http")
        ready = asyncio.create_task(self._server.ready.wait())
        await asyncio.wait({self._task, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._task.done():
            self._task.result()
            raise ConfigError(f"http_port: the HTTP server ended at once on {host}:{port}")
        return f"{host}:{listener.getsockname()[1]}"

    async def stop(self) -> None:
        """Close; answers that still run are cut after a second. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            self._server.should_exit = True
            await asyncio.wait({task})


def _check_pair(cert_file: str, key_file: str) -> None:
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert_file, key_file)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"tls_cert_file: {cert_file} with tls_key_file {key_file} is no certificate: {error}"
        ) from error


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        message = f"http_port: cannot listen on {host}:{port}: {error.strerror}"
        raise ConfigError(message) from error
    listener.setblocking(False)
    return listener
