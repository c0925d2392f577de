"""A request's body, bounded; and the moment at which its sender leaves."""

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
        PayloadTooLargeError: it is longer than a gRPC message may be.
        InvalidArgumentError: it is not JSON.
        CancelledError: the client left while sending.
    """
    headers = dict(scope["headers"])
    declared = headers.get(b"content-length", b"0")
    too_large = declared.isdigit() and int(declared) > MAX_RECEIVE_BYTES
    if too_large and b"expect" in headers:
        _refuse_size()  # a client that asks first has sent nothing yet
    parts: list[bytes] = []
    size = 0
    more = True
    while more and size <= MAX_DISCARDED_BYTES:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise CancelledError("the client left while sending its request")
        part = message.get("body", b"")
        size += len(part)
        more = message.get("more_body", False)
        # What is too much is read all the same: closing on a client that still sends would reset
        # the connection before it has read the answer.
        too_large = too_large or size > MAX_RECEIVE_BYTES
        if too_large:
            parts.clear()
        else:
            parts.append(part)
    if too_large:
        _refuse_size()
    return _decode(b"".join(parts))


async def until_gone(receive: Receive) -> None:
    """Return once the client has closed its side."""
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
