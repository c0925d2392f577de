"""Inflates request bodies that were sent with Content-Encoding gzip or deflate, within a bound."""

import zlib
from typing import NoReturn

from services.common.errors import InvalidArgumentError
from services.gateway.openai.errors import UnsupportedEncodingError, refuse_size

FIELD = "Content-Encoding"
ACCEPTED = "gzip, deflate"
MAX_MEMBERS = 64
"""Members of a gzip body: each costs a decoder and a copy of what follows, even if it is empty."""
_GZIP, _ZLIB, _RAW = 31, 15, -15
_NAMES = {"gzip": "gzip", "x-gzip": "gzip", "deflate": "deflate"}


def encoding_of(header: str) -> str | None:
    """The encoding of a body: gzip, deflate, or None if it is sent as it is.

    Raises:
        UnsupportedEncodingError: another encoding, or more than one.
    """
    named = [name for part in header.split(",") if (name := part.strip().lower())]
    encodings = [name for name in named if name != "identity"]
    if not encodings:
        return None
    if len(encodings) > 1 or encodings[0] not in _NAMES:
        raise UnsupportedEncodingError.for_header(FIELD, header, ACCEPTED)
    return _NAMES[encodings[0]]


def inflate(data: bytes, encoding: str, most: int) -> bytes:
    """The data as it was before compression; `deflate` with or without zlib's own header.

    Args:
        encoding: gzip or deflate.
        most: bytes that the result may have.

    Raises:
        PayloadTooLargeError: the result is longer; nothing beyond `most` + 1 bytes is made.
        InvalidArgumentError: the data is damaged or incomplete, or has more than MAX_MEMBERS.
    """
    if encoding == "gzip":
        return _inflate(data, _GZIP, encoding, most)
    # The specification means zlib's format; some clients send its content alone.
    header = len(data) > 1 and data[0] & 15 == 8 and not int.from_bytes(data[:2], "big") % 31
    return _inflate(data, _ZLIB if header else _RAW, encoding, most)


def _inflate(data: bytes, wbits: int, encoding: str, most: int) -> bytes:
    out = bytearray()
    for _ in range(MAX_MEMBERS):
        member = zlib.decompressobj(wbits)
        try:
            # 0 would mean no bound: with one byte more, the bound is exceeded and not reached.
            out += member.decompress(data, most + 1 - len(out))
        except zlib.error as error:
            _refuse(encoding, str(error))
        if len(out) > most:
            refuse_size(most)
        if not member.eof:
            _refuse(encoding, "it ends too early")
        data = member.unused_data
        if not data:
            return bytes(out)
        if encoding != "gzip":  # a gzip file may have several members, one after another
            _refuse(encoding, "more data follows its end")
    _refuse(encoding, f"it has more than {MAX_MEMBERS} members")


def _refuse(encoding: str, problem: str) -> NoReturn:
    raise InvalidArgumentError.for_field(
        FIELD, f"the body is not {encoding} data: {problem}", reason="INVALID_ENCODING"
    )
