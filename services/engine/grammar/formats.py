"""The formats of strings that are enforced; every other format is an annotation.

The second engine has some of them. The others are replaced by one of these, or by a pattern, which
allows fewer texts and never a wrong one.
"""

from collections.abc import Mapping

FORMATS = frozenset(
    {
        *("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6"),
        *("uuid", "uri"),
    }
)
"""What llguidance enforces. xgrammar allows 30 February, and drops a format beside a pattern."""
NARROWER: Mapping[str, str] = {
    **dict.fromkeys(("iri", "iri-reference", "uri-reference", "uri-template"), "uri"),
    "idn-email": "email",
    "idn-hostname": "hostname",
}
_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_ATOM = (
    r"(?:[A-Za-z0-9_ ,:;@#%&=~/.-]|\\[dDwWsS.*+?()\[\]{}|^$/\\]"
    r"|\[\^?(?:a-z|A-Z|0-9|[A-Za-z0-9_ .,:/@])+\])"
)
PATTERNS: Mapping[str, str] = {
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(?:0|[1-9][0-9]{{0,8}})(?:#|{_POINTER})$",
    "regex": rf"^\^?(?:{_ATOM}[*+?]?)*\$?$",
}
