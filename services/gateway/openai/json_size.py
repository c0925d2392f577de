"""Bounds the values of a large JSON body before it is decoded.

The decoder holds the interpreter, also from a thread, for as long as it makes values: seconds for
16 MiB of empty arrays. What makes a body large otherwise, long texts, costs little.
"""

import re

from services.common.errors import InvalidArgumentError

MAX_CONTAINERS = 131_072
MAX_COMMAS = 1_250_000
"""More than the token ids that all prompts of a request may have."""
_STRING = re.compile(rb'"[^"]*"?')
"""Also one without an end, so that it never fails and tries again from within."""


def check_values(raw: bytes) -> None:
    """Refuse a body with too many values.

    Raises:
        InvalidArgumentError: more than MAX_CONTAINERS arrays and objects, or MAX_COMMAS commas.
    """
    if raw.count(b"[") + raw.count(b"{") <= MAX_CONTAINERS and raw.count(b",") <= MAX_COMMAS:
        return  # even if none of them is within a text
    raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")  # so that a quote is the end of its text
    containers = commas = end = 0
    for strings, found in enumerate(_STRING.finditer(raw)):
        start = found.start()
        containers += raw.count(b"[", end, start) + raw.count(b"{", end, start)
        commas += raw.count(b",", end, start)
        end = found.end()
        _check(containers, commas)
        if strings > 2 * (containers + commas):
            return  # strings without anything between them: the decoder stops here
    containers += raw.count(b"[", end) + raw.count(b"{", end)
    _check(containers, commas + raw.count(b",", end))


def _check(containers: int, commas: int) -> None:
    if containers <= MAX_CONTAINERS and commas <= MAX_COMMAS:
        return
    what = "commas" if commas > MAX_COMMAS else "arrays and objects"
    most = MAX_COMMAS if commas > MAX_COMMAS else MAX_CONTAINERS
    raise InvalidArgumentError(
        f"the body has more than {most} {what} outside of texts", reason="TOO_MANY_VALUES"
    )
