"""/metrics for Prometheus and /healthz for people, on a port of their own."""

import threading
from collections.abc import Callable
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app

from services.common.config import ConfigError


class MetricsServer:
    """Serves one registry from a thread, so that a busy loop still answers a scrape."""

    def __init__(self, registry: CollectorRegistry, healthy: Callable[[], bool]) -> None:
        self._scrape = make_wsgi_app(registry)
        self._healthy = healthy
        self._server: WSGIServer | None = None

    def start(self, host: str, port: int) -> str:
        """Listen and return host:port.

        Raises:
            ConfigError: the port cannot be had.
        """
        try:
            self._server = make_server(host, port, self._answer, handler_class=_Quiet)
        except OSError as error:
            message = f"metrics_port: cannot listen on {host}:{port}: {error.strerror}"
            raise ConfigError(message) from error
        # `stop` waits for one poll.
        threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="metrics", daemon=True
        ).start()
        return f"{host}:{self._server.server_port}"

    def stop(self) -> None:
        """Close the port; idempotent."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
        if environ["PATH_INFO"] == "/metrics":
            return list(self._scrape(environ, start_response))
        if environ["PATH_INFO"] != "/healthz":
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"try /metrics or /healthz\n"]
        healthy = self._healthy()
        start_response(
            "200 OK" if healthy else "503 Service Unavailable", [("Content-Type", "text/plain")]
        )
        return [b"ok\n" if healthy else b"not serving\n"]


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """A scrape every few seconds is not worth a line each."""
