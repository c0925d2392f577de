"""Reads and decodes the body of a request, within bounds; waits for its sender to disconnect."""

import asyncio
import codecs
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Message, Receive, Scope

from services.common.errors import CancelledError, InvalidArgumentError
from services.common.rpc import MAX_RECEIVE_BYTES
from services.gateway.openai.content_encoding import encoding_of, inflate
from services.gateway.openai.errors import UnsupportedEncodingError, refuse_size
from services.gateway.openai.json_size import check_values

MAX_DISCARDED_BYTES = 8 * MAX_RECEIVE_BYTES
LARGE_BYTES = 256 * 1024
"""A longer body is decoded by a thread; a shorter one cannot have too many values."""
_LARGE_BODIES = ThreadPoolExecutor(1, "large-bodies")
"""Of all requests, so that they are inflated and decoded one at a time."""


@dataclass(frozen=True)
class SentBody:
    """A whole body as it was sent; `encoding` is one of `encoding_of`."""

    raw: bytes
    encoding: str | None


async def read_body(scope: Scope, receive: Receive) -> SentBody:
    """The body, neither inflated nor decoded.

    Raises:
        PayloadTooLargeError: the body is longer than a gRPC message may be.
        UnsupportedEncodingError: the body has an encoding that is not read here.
        CancelledError: the client disconnected while sending.
    """
    headers = dict(scope["headers"])
    sent = [value for name, value in scope["headers"] if name == b"content-encoding"]
    try:
        encoding = encoding_of(b", ".join(sent).decode("latin-1"))
    except UnsupportedEncodingError:
        if b"expect" not in headers:  # else the client waits for 100 Continue: nothing was sent
            await _read_bytes(headers, receive)  # as for a body that is too large
        raise
    return SentBody(await _read_bytes(headers, receive), encoding)


async def decode(sent: SentBody) -> Any:
    """The body as a JSON value; costly, so the caller should be known before.

    Raises:
        PayloadTooLargeError: the body is too long once it is inflated.
        InvalidArgumentError: the body is not JSON, is damaged, or has too many values.
    """
    if sent.encoding is None and len(sent.raw) <= LARGE_BYTES:
        return _decode(sent.raw)
    # A small body may inflate to the whole bound.
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_LARGE_BODIES, _decode_large, sent)


def _decode_large(sent: SentBody) -> Any:
    raw = sent.raw
    if sent.encoding is not None:
        raw = inflate(raw, sent.encoding, MAX_RECEIVE_BYTES)
    if len(raw) > LARGE_BYTES:
        check_values(raw)
    return _decode(raw)


async def _read_bytes(headers: dict[bytes, bytes], receive: Receive) -> bytes:
    declared = headers.get(b"content-length", b"0")
    too_large = declared.isdigit() and int(declared) > MAX_RECEIVE_BYTES
    if too_large and b"expect" in headers:
        refuse_size(MAX_RECEIVE_BYTES)  # as above: nothing has been sent
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
        refuse_size(MAX_RECEIVE_BYTES)
    return b"".join(parts)


async def wait_disconnect(receive: Receive) -> None:
    """Return once the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _decode(raw: bytes) -> Any:
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise InvalidArgumentError(
            "the body is not JSON: it is encoded in UTF-16; send UTF-8", reason="INVALID_JSON"
        )
    try:
        return msgspec.json.decode(raw.removeprefix(codecs.BOM_UTF8))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidArgumentError(
            f"the body is not JSON: {str(error)[:200]}", reason="INVALID_JSON"
        ) from None
