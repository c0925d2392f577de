"""Parses `kv_memory`: a fraction of the free memory (0.9) or a size (2GiB)."""

import re

_UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(KiB|MiB|GiB|TiB)?", re.ASCII)
_MAX_BYTES = 2**50
"""More than any machine has: such a size has a wrong unit."""


def parse_size(text: str) -> float | int:
    """A fraction from 0 to 1 as a float, or bytes as an int.

    Raises:
        ValueError: the text is neither; the message names the expected form.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("expected a fraction (0.9) or a size (2GiB)")
    number, unit = float(match[1]), match[2]
    if unit is None:
        if number <= 1:
            return number
        if "." in match[1]:
            raise ValueError("expected a fraction of at most 1, or a size with its unit (2GiB)")
    size = number * _UNITS[unit or ""]
    if size > _MAX_BYTES:
        raise ValueError(f"expected at most {_MAX_BYTES // 2**40}TiB")
    return int(size)


def bad_size(text: str) -> str | None:
    """What is wrong with a text, or None; for `setting(check=…)`."""
    try:
        parse_size(text)
    except ValueError as error:
        return str(error)
    return None
