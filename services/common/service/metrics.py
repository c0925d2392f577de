"""A service's HTTP port for operators: /metrics for Prometheus, /healthz and /log-level.

`PUT /log-level`, with the level as the body, needs the fleet's token. In a fleet without a token
it is only allowed from the same host.
"""

import hmac
import ipaddress
import platform
import threading
from collections.abc import Callable
from importlib import metadata
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    Info,
    ProcessCollector,
    make_wsgi_app,
)

from services.common.config.service_config import LOG_LEVELS
from services.common.config.settings import ConfigError
from services.common.service.log_level import LogLevel

TOKEN_VARIABLE = "HTTP_INFERFLEET_FLEET_TOKEN"
_MAX_BODY = 64


class MetricsServer:
    """Serves one registry from a thread of its own, so that a scrape works while the loop is busy.

    Adds the series of the process and of the build to the registry.

    Args:
        healthy: what /healthz answers; called in that thread.
        log_level: what /log-level reads and sets.
        token: the fleet's token, which a caller must show to change the log level.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        healthy: Callable[[], bool],
        log_level: LogLevel,
        token: str | None = None,
    ) -> None:
        self._token = token
        self._log_level = log_level
        _add_process_series(registry)
        self._scrape = make_wsgi_app(registry)
        self._healthy = healthy
        self._server: WSGIServer | None = None

    def start(self, host: str, port: int) -> str:
        """Listen and return host:port.

        Raises:
            ConfigError: the port is taken or not allowed.
        """
        try:
            self._server = make_server(
                host, port, self._answer, server_class=_Server, handler_class=_Quiet
            )
        except OSError as error:
            message = f"metrics_port: cannot listen on {host}:{port}: {error.strerror}"
            raise ConfigError(message) from error
        # 0.1 s between polls, because `stop` waits for one.
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
        status, text = self._answer_text(environ)
        start_response(status, [("Content-Type", "text/plain")])
        return [text.encode() + b"\n"]

    def _answer_text(self, environ: WSGIEnvironment) -> tuple[str, str]:
        if environ["PATH_INFO"] == "/log-level":
            return self._answer_log_level(environ)
        if environ["PATH_INFO"] != "/healthz":
            return "404 Not Found", "try /metrics, /healthz or /log-level"
        if self._healthy():
            return "200 OK", "ok"
        return "503 Service Unavailable", "not serving"

    def _answer_log_level(self, environ: WSGIEnvironment) -> tuple[str, str]:
        method = environ["REQUEST_METHOD"]
        if method == "GET":
            return "200 OK", self._log_level.current
        if method != "PUT":
            return "405 Method Not Allowed", "GET or PUT"
        if not self._may_change(environ):
            return "403 Forbidden", _FORBIDDEN[self._token is not None]
        length = environ.get("CONTENT_LENGTH") or "0"
        size = min(int(length), _MAX_BODY) if length.isdigit() else 0
        level = environ["wsgi.input"].read(size).decode(errors="replace").strip().lower()
        if level not in LOG_LEVELS:
            return "400 Bad Request", f"the body must be one of {', '.join(LOG_LEVELS)}"
        self._log_level.set(level, by=str(environ.get("REMOTE_ADDR", "")))
        return "200 OK", level

    def _may_change(self, environ: WSGIEnvironment) -> bool:
        if self._token is not None:
            shown = str(environ.get(TOKEN_VARIABLE, ""))
            return hmac.compare_digest(shown.encode(), self._token.encode())
        return ipaddress.ip_address(str(environ["REMOTE_ADDR"])).is_loopback


_FORBIDDEN = {
    True: "the header inferfleet-fleet-token must hold the fleet's token",
    False: "allowed only from the same host, because the fleet has no token",
}


def _add_process_series(registry: CollectorRegistry) -> None:
    """Add memory, processor time, open files, garbage collection and the build."""
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    try:
        version = metadata.version("inferfleet")
    except metadata.PackageNotFoundError:  # run from a folder that is not installed
        version = "unknown"
    build = Info("inferfleet_build", "Version of this process", registry=registry)
    build.info({"version": version, "python": platform.python_version()})


class _Server(WSGIServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore it: a client that left or was silent is no error of the service."""


class _Quiet(WSGIRequestHandler):
    # Requests are served one by one, so a client that sends nothing must not block a scrape.
    timeout = 5.0

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: there is a scrape every few seconds."""
