"""/metrics for Prometheus, /healthz for people, /log-level for operators, on a port of their own.

`PUT /log-level` with the level as the body asks for the fleet's token; where the fleet has none,
only this host may change it.
"""

import hmac
import ipaddress
import threading
from collections.abc import Callable
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import StartResponse, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app

from services.common.config.service_config import LOG_LEVELS
from services.common.config.settings import ConfigError
from services.common.service import telemetry

TOKEN_VARIABLE = "HTTP_INFERFLEET_FLEET_TOKEN"
_MAX_BODY = 64


class MetricsServer:
    """Serves one registry from a thread, so that a busy loop still answers a scrape.

    Args:
        token: the fleet's, which who changes the log level must show.
    """

    def __init__(
        self, registry: CollectorRegistry, healthy: Callable[[], bool], token: str | None = None
    ) -> None:
        self._token = token
        self._scrape = make_wsgi_app(registry)
        self._healthy = healthy
        self._server: WSGIServer | None = None

    def start(self, host: str, port: int) -> str:
        """Listen and return host:port.

        Raises:
            ConfigError: the port cannot be had.
        """
        try:
            self._server = make_server(
                host, port, self._answer, server_class=_Server, handler_class=_Quiet
            )
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
        status, text = self._plain(environ)
        start_response(status, [("Content-Type", "text/plain")])
        return [text.encode() + b"\n"]

    def _plain(self, environ: WSGIEnvironment) -> tuple[str, str]:
        if environ["PATH_INFO"] == "/log-level":
            return self._log_level(environ)
        if environ["PATH_INFO"] != "/healthz":
            return "404 Not Found", "try /metrics, /healthz or /log-level"
        if self._healthy():
            return "200 OK", "ok"
        return "503 Service Unavailable", "not serving"

    def _log_level(self, environ: WSGIEnvironment) -> tuple[str, str]:
        method = environ["REQUEST_METHOD"]
        if method == "GET":
            return "200 OK", telemetry.log_level()
        if method != "PUT":
            return "405 Method Not Allowed", "GET or PUT"
        if not self._may_change(environ):
            return "403 Forbidden", _FORBIDDEN[self._token is not None]
        length = environ.get("CONTENT_LENGTH") or "0"
        size = min(int(length), _MAX_BODY) if length.isdigit() else 0
        level = environ["wsgi.input"].read(size).decode(errors="replace").strip().lower()
        if level not in LOG_LEVELS:
            return "400 Bad Request", f"the body must be one of {', '.join(LOG_LEVELS)}"
        telemetry.set_log_level(level, by=str(environ.get("REMOTE_ADDR", "")))
        return "200 OK", level

    def _may_change(self, environ: WSGIEnvironment) -> bool:
        if self._token is not None:
            shown = str(environ.get(TOKEN_VARIABLE, ""))
            return hmac.compare_digest(shown.encode(), self._token.encode())
        return ipaddress.ip_address(str(environ["REMOTE_ADDR"])).is_loopback


_FORBIDDEN = {
    True: "show the fleet's token as the header inferfleet-fleet-token",
    False: "only from this host, because the fleet has no token",
}


class _Server(WSGIServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A client that left or stood still is nobody's error."""


class _Quiet(WSGIRequestHandler):
    # One after the other: who sends nothing must not keep a scrape out.
    timeout = 5.0

    def log_message(self, format: str, *args: object) -> None:
        """A scrape every few seconds is not worth a line each."""
