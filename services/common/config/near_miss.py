"""Suggestions for mistyped names."""

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches

_SAME_WORD = 0.7


def meant(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the end of a message; "" if no known name is close."""
    close = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def misspelt(name: str, known: Iterable[str]) -> str:
    """The known name that differs from `name` by a typing error only; "" if there is none.

    Stricter than `meant`: words are compared one by one, so that a similar name
    (etcd_tls_ca_file, redis_tls_ca_file) does not count as a typing error.
    """
    return next((one for one in known if one != name and _typo(name, one)), "")


def _typo(one: str, other: str) -> bool:
    if one.replace("_", "") == other.replace("_", ""):
        return True
    words = list(zip(one.split("_"), other.split("_"), strict=False))
    if len(words) != one.count("_") + 1 or len(words) != other.count("_") + 1:
        return False
    return all(a == b or SequenceMatcher(None, a, b).ratio() >= _SAME_WORD for a, b in words)
