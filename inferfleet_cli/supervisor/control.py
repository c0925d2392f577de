"""How commands reach a running supervisor: one JSON line each way, on a loopback port.

A request carries the fleet's token, which only the same user can read.
"""

import asyncio
import hmac
import json
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from inferfleet_cli.errors import CliError
from inferfleet_cli.supervisor.state_dir import StateDir, require_record

MAX_LINE_BYTES = 64 * 1024
TIMEOUT_S = 15.0
Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class ControlServer:
    """Serves `status` and `trace` to the commands of the same user."""

    def __init__(self, token: str, handlers: dict[str, Handler]) -> None:
        self._token = token
        self._handlers = handlers
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        """Listen on a free loopback port; returns the port."""
        self._server = await asyncio.start_server(
            self._serve_connection, "127.0.0.1", 0, limit=MAX_LINE_BYTES
        )
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Close the port; idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _serve_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            reply = await self._reply_to(await _read_request(reader))
            writer.write(json.dumps(reply).encode() + b"\n")
            await writer.drain()
        except (TimeoutError, OSError):
            pass  # a caller that sends no line, or has left, needs no answer
        finally:
            writer.close()

    async def _reply_to(self, request: Any) -> dict[str, Any]:
        if request is None:
            return {
                "error": f"the request must be one line of JSON, {MAX_LINE_BYTES} bytes at most"
            }
        if not isinstance(request, dict) or not hmac.compare_digest(
            str(request.get("token", "")).encode(), self._token.encode()
        ):
            return {
                "error": "the token is wrong: run the command as the user who started the fleet"
            }
        handler = self._handlers.get(str(request.get("command")))
        if handler is None:
            return {"error": f"unknown command: {request.get('command')}"}
        return await handler(request)


async def _read_request(reader: asyncio.StreamReader) -> Any:
    """The caller's line as JSON; None if it is not JSON or too long.

    Raises:
        TimeoutError: no line came in time.
    """
    try:
        return json.loads(await asyncio.wait_for(reader.readline(), TIMEOUT_S))
    except ValueError:
        return None


def send_command(state_dir: Path, command: str, **arguments: Any) -> dict[str, Any]:
    """Send one command to the supervisor of a state directory; returns its reply.

    Raises:
        CliError: no fleet runs there, the supervisor does not answer, or it replies with an error.
    """
    record = require_record(state_dir)
    try:
        request = {"token": StateDir(state_dir).token(), "command": command, **arguments}
        with socket.create_connection(("127.0.0.1", record["control_port"]), TIMEOUT_S) as link:
            link.sendall(json.dumps(request).encode() + b"\n")
            line = link.makefile("rb").readline()
            reply = json.loads(line)
    except (OSError, ValueError) as error:
        raise CliError(f"the supervisor of {state_dir} does not answer: {error}") from error
    if "error" in reply:
        raise CliError(str(reply["error"]))
    return dict(reply)
