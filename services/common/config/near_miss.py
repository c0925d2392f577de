"""Which known name a mistyped one was meant to be."""

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches

_SAME_WORD = 0.7


def meant(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for an error's end, or "" if nothing is close."""
    close = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def misspelt(name: str, known: Iterable[str]) -> str:
    """The known name that differs by a typing error alone, or "".

    Stricter than `meant`: another name of the same make (etcd_tls_ca_file, redis_tls_ca_file) is
    no typing error, so words are compared one by one.
    """
    return next((one for one in known if one != name and _typo(name, one)), "")


def _typo(one: str, other: str) -> bool:
    if one.replace("_", "") == other.replace("_", ""):
        return True
    words = list(zip(one.split("_"), other.split("_"), strict=False))
    if len(words) != one.count("_") + 1 or len(words) != other.count("_") + 1:
        return False
    return all(a == b or SequenceMatcher(None, a, b).ratio() >= _SAME_WORD for a, b in words)
