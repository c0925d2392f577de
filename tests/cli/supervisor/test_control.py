"""The supervisor's control port, spoken to as a command would, and as it should not be."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from inferfleet_cli.supervisor.control import MAX_LINE_BYTES, ControlServer

Send = Callable[[bytes], Awaitable[Any]]


@pytest.fixture
async def send() -> AsyncIterator[Send]:
    """Sends a line and returns the reply, None if there is none."""

    async def greet(request: dict[str, Any]) -> dict[str, Any]:
        return {"greeted": request["name"]}

    server = ControlServer("the-token", {"greet": greet})
    port = await server.start()

    async def exchange(line: bytes) -> Any:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(line + b"\n")
        reply = await asyncio.wait_for(reader.readline(), 10)
        writer.close()
        return json.loads(reply) if reply else None

    yield exchange
    await server.stop()


async def test_a_command_is_answered(send: Send) -> None:
    request = {"token": "the-token", "command": "greet", "name": "you"}
    assert await send(json.dumps(request).encode()) == {"greeted": "you"}


@pytest.mark.parametrize("line", [b"", b"{", b"\xff", b"1" * (MAX_LINE_BYTES + 1)])
async def test_what_is_no_line_of_json_gets_an_error(send: Send, line: bytes) -> None:
    assert "one line of JSON" in (await send(line))["error"]


@pytest.mark.parametrize(
    ("request_", "problem"),
    [
        ([], "the token is wrong"),
        ({"token": "another", "command": "greet"}, "the token is wrong"),
        ({"token": "the-token", "command": "dance"}, "unknown command: dance"),
    ],
)
async def test_a_request_that_cannot_be_served_gets_an_error(
    send: Send, request_: Any, problem: str
) -> None:
    assert problem in (await send(json.dumps(request_).encode()))["error"]
