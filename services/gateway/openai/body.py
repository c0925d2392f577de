"""Reads the body of a request, with a bound, and waits for its sender to disconnect."""

from typing import Any, NoReturn

import msgspec
from starlette.types import Message, Receive, Scope

from services.common.errors import CancelledError, InvalidArgumentError
from services.common.rpc import MAX_RECEIVE_BYTES
from services.gateway.openai.errors import PayloadTooLargeError

MAX_DISCARDED_BYTES = 8 * MAX_RECEIVE_BYTES


async def read_json(scope: Scope, receive: Receive) -> Any:
    """The body as a JSON value.

    Raises:
        PayloadTooLargeError: the body is longer than a gRPC message may be.
        InvalidArgumentError: the body is not JSON.
        CancelledError: the client disconnected while sending.
    """
    headers = dict(scope["headers"])
    declared = headers.get(b"content-length", b"0")
    too_large = declared.isdigit() and int(declared) > MAX_RECEIVE_BYTES
    if too_large and b"expect" in headers:
        _refuse_size()  # the client waits for 100 Continue and has sent nothing
    parts: list[bytes] = []
    size = 0
    more = True
    while more and size <= MAX_DISCARDED_BYTES:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise CancelledError("the client disconnected while sending its request")
        part = message.get("body", b"")
        size += len(part)
        more = message.get("more_body", False)
        # The rest of a body that is too large is read and discarded: closing the connection while
        # the client sends would reset it before the client has read the answer.
        too_large = too_large or size > MAX_RECEIVE_BYTES
        if too_large:
            parts.clear()
        else:
            parts.append(part)
    if too_large:
        _refuse_size()
    return _decode(b"".join(parts))


async def wait_disconnect(receive: Receive) -> None:
    """Return once the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _decode(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgumentError(
            f"the body is not JSON: {str(error)[:200]}", reason="INVALID_JSON"
        ) from None


def _refuse_size() -> NoReturn:
    raise PayloadTooLargeError(
        f"the body is longer than {MAX_RECEIVE_BYTES} bytes", reason="PAYLOAD_TOO_LARGE"
    )
