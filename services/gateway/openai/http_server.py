"""uvicorn inside the gateway's event loop, without its signal handlers and logs."""

import asyncio
import contextlib
import functools
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from services.common.config.settings import ConfigError
from services.common.rpc.tls_files import TlsFiles
from services.gateway.openai.http_bounds import HttpBounds, HttpLoad
from services.gateway.openai.http_connection import HttpConnection
from services.gateway.openai.old_clients import EndByClosing

MakeContext = Callable[[uvicorn.Config, Callable[[], ssl.SSLContext]], ssl.SSLContext]

BACKLOG = 2048


class _Embedded(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # lifecycle.run handles the signals of the process

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self.ready.set()


class HttpServer:
    """Serves one ASGI application.

    Args:
        app: the application.
        files: certificate and key for HTTPS, reloaded when they are replaced; None for HTTP.
        bounds: of heads and bodies.
        on_refused: called with the HTTP status of each request that exceeds them.
    """

    def __init__(
        self,
        app: ASGIApp,
        files: TlsFiles | None = None,
        *,
        bounds: HttpBounds | None = None,
        on_refused: Callable[[int], None] = lambda status: None,
    ) -> None:
        bounds = bounds or HttpBounds()
        # uvicorn calls it for each connection.
        make_connection: Any = functools.partial(HttpConnection, HttpLoad(bounds, on_refused))
        _, cert_file, key_file = files.paths if files is not None else ("", "", "")
        self._server = _Embedded(
            uvicorn.Config(
                EndByClosing(app),
                http=make_connection,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                ssl_certfile=cert_file or None,
                ssl_keyfile=key_file or None,
                ssl_context_factory=_reloading_contexts(files) if files is not None else None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=int(bounds.idle_s),
                timeout_graceful_shutdown=1,
            )
        )
        self._task: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> str:
        """Listen and return host:port.

        Raises:
            ConfigError: it cannot listen on the port.
        """
        listener = _listen(host, port)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name="http")
        ready = asyncio.create_task(self._server.ready.wait())
        await asyncio.wait({self._task, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if self._task.done():
            self._task.result()
            raise ConfigError(f"http_port: the HTTP server on {host}:{port} ended at once")
        return f"{host}:{listener.getsockname()[1]}"

    async def stop(self) -> None:
        """Stop listening; running answers are cut after a second. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            self._server.should_exit = True
            await asyncio.wait({task})


def _reloading_contexts(files: TlsFiles) -> MakeContext:
    """Makes TLS contexts that check the files for changes before each handshake."""

    def make(config: uvicorn.Config, default: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
        del config
        version, newest = files.newest()[0], default()

        def select_context(
            handshake: ssl.SSLObject, name: str | None, first: ssl.SSLContext
        ) -> None:
            del name, first
            nonlocal version, newest
            current, _ = files.newest()
            if current != version:
                # A new context, because one that is in use must not change.
                with contextlib.suppress(
                    OSError
                ):  # being replaced again: the next handshake retries
                    version, newest = current, default()
            handshake.context = newest

        listening = default()
        listening.sni_callback = select_context  # also called without a server name
        return listening

    return make


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
