"""The supervisor's own face: one JSON line in, one out, on a loopback port, with the token."""

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
    """Answers `status` and `trace` for the commands of the same user."""

    def __init__(self, token: str, handlers: dict[str, Handler]) -> None:
        self._token = token
        self._handlers = handlers
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        """Listen on a free port of the loopback; returns it."""
        self._server = await asyncio.start_server(
            self._answer, "127.0.0.1", 0, limit=MAX_LINE_BYTES
        )
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Close the port; idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line = await asyncio.wait_for(reader.readline(), TIMEOUT_S)
            reply = await self._reply(json.loads(line))
            writer.write(json.dumps(reply).encode() + b"\n")
            await writer.drain()
        except (TimeoutError, OSError, ValueError):
            pass  # a caller that says nothing sensible, or leaves, gets no answer
        finally:
            writer.close()

    async def _reply(self, request: Any) -> dict[str, Any]:
        if not isinstance(request, dict) or not hmac.compare_digest(
            str(request.get("token", "")).encode(), self._token.encode()
        ):
            return {"error": "not allowed"}
        handler = self._handlers.get(str(request.get("command")))
        if handler is None:
            return {"error": f"no such command: {request.get('command')}"}
        return await handler(request)


def ask(state_dir: Path, command: str, **arguments: Any) -> dict[str, Any]:
    """One question to the supervisor of a state directory.

    Raises:
        CliError: no fleet runs there, or it does not answer, or it answers with an error.
    """
    record = require_record(state_dir)
    request = {"token": StateDir(state_dir).token(), "command": command, **arguments}
    try:
        with socket.create_connection(("127.0.0.1", record["control_port"]), TIMEOUT_S) as link:
            link.sendall(json.dumps(request).encode() + b"\n")
            line = link.makefile("rb").readline()
            reply = json.loads(line)
    except (OSError, ValueError) as error:
        raise CliError(f"the fleet in {state_dir} does not answer: {error}") from error
    if "error" in reply:
        raise CliError(str(reply["error"]))
    return dict(reply)
