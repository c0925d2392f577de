"""Rewrites ECMA-262 patterns for the second engine, which reads the syntax of Rust's regex.

What the two read differently is written out: `.`, `\\s`, `\\S`, escapes, brackets in classes. What
has no equivalent is refused: look-around, back-references, word boundaries, possessive repeats.
"""

import re
import sys
import warnings

MAX_PATTERN_CHARS = 4096
_BLANKS = (
    r"\t\n\x0b\f\r \u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}\u{feff}"
)
_ENDS = r"[^\n\r\u{2028}\u{2029}]"
_PART = re.compile(
    r"\\u\{[0-9a-fA-F]{1,6}\}|\\u[0-9a-fA-F]{4}|\\x[0-9a-fA-F]{2}|\\c[A-Za-z]"
    r"|\\[pP]\{[A-Za-z_=]+\}|\\.|\{\d+(?:,\d*)?\}|\(\?<?[=!]|\(\?[:<]?|.",
    re.DOTALL,
)
_ALL = ({r"\s", r"\S"}, {r"\d", r"\D"}, {r"\w", r"\W"})
_CONTROLS = "".join(map(chr, {*range(0x20)} - {0x09, 0x0A}))
_FEW_CONTROLS = r"[^\x00-\x08\x0b-\x1f]"
_NOT_ALL_OF = re.compile(r"\^\(\?!\^?\[([^]\\^][^]\\]*)\]\*\$\)(.*)", re.DOTALL)
_MALFORMED = ("missing ), ", "unbalanced parenthesis", "bad character range", "min repeat")
_KEPT = frozenset("dDwWtnrfv")
_SYNTAX = frozenset("\\.+*?()|[]{}^$#&-~/")


def without_look_ahead(pattern: str) -> list[str]:
    """Patterns that all must match, for one that begins by excluding texts of some characters.

    `^(?!^[-+.]*$)…`, as pydantic writes a Decimal, is `^…` and `[^-+.]`.
    """
    found = _NOT_ALL_OF.fullmatch(pattern)
    return [f"^{found[2]}", f"[^{found[1]}]"] if found else [pattern]


def strict_pattern(pattern: str) -> str:
    """The pattern in the second engine's syntax.

    Raises:
        ValueError: it has no equivalent; the message says why.
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        raise ValueError(f"has more than {MAX_PATTERN_CHARS} characters")
    parts = _PART.findall(pattern)
    if parts[-1:] == ["\\"]:
        raise ValueError("ends with a backslash that escapes nothing")
    _check_form(parts)
    out: list[str] = []
    at = 0
    while at < len(parts):
        part = parts[at]
        if part == "[":
            at, text = _class(parts, at + 1)
        else:
            text = _outside(part)
            after_repeat = bool(out) and out[-1][-1:] in "*+?}" and parts[at - 1][0] != "\\"
            if text == "+" and after_repeat:
                raise ValueError("possessive repeats are not supported")
            at += 1
        out.append(text)
    return "".join(out)


def _check_form(parts: list[str]) -> None:
    """Refuse what the second engine refuses too, but without a path: wrong groups and ranges."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            re.compile("".join(map(_for_python, parts)))
    except re.error as error:
        if error.msg.startswith(_MALFORMED):
            raise ValueError(f"is not a valid regular expression: {error.msg}") from error
    except (OverflowError, RecursionError):
        pass  # a limit of Python's, not of the pattern's form


def _for_python(part: str) -> str:
    if part == "(?<":
        return "(?P<"
    if part[:3] == "\\u{":
        code = int(part[3:-1], 16)
        return f"\\U{code:08x}" if code <= sys.maxunicode else part
    if part[:3] in ("\\p{", "\\P{"):
        return r"\d"
    return f"\\x{ord(part[2].upper()) - 64:02x}" if part[:2] == "\\c" and part[2:] else part


def _outside(part: str) -> str:
    if part == ".":
        return _ENDS
    if part in ("(?=", "(?!", "(?<=", "(?<!"):
        raise ValueError("look-around is not supported")
    if part == "(?":
        raise ValueError("flags of groups are not supported")
    if part == r"\s":
        return f"[{_BLANKS}]"
    if part == r"\S":
        return f"[^{_BLANKS}]"
    if part in ("{", "}", "]"):
        return f"\\{part}"
    return _escape(part) if part[0] == "\\" else part


def _class(parts: list[str], at: int) -> tuple[int, str]:
    """The class that begins before `at`: the index behind it, and its text."""
    start, out = at, ["["]
    if at < len(parts) and parts[at] == "^":
        out.append("^")
        at += 1
    if at < len(parts) and parts[at] == "]":
        raise ValueError("an empty character class is not supported")
    while at < len(parts):
        part = parts[at]
        at += 1
        if part == "]":
            if set(parts[start : at - 1]) in _ALL:
                return at, "(?s:.)"
            return at, _without_controls(parts[start : at - 1], "".join(out) + "]")
        if part == "-" and at < len(parts) and parts[at] == "-":
            raise ValueError("-- in a character class is not supported")
        out.append(_inside(part))
    raise ValueError("a character class has no end")


def _without_controls(source: list[str], written: str) -> str:
    """A class without most control characters, if it excludes the quotation mark or the backslash.

    Of a class with all of them, the engine also allows every escape: `\\"` for `[^"]`.

    Args:
        source: the parts of the class as it was sent, without its brackets.
        written: the class for the engine.
    """
    plain = "".join(f"\\{part}" if part in tuple("[&~|") else part for part in source)
    try:
        members = re.compile(f"[{plain}]", re.ASCII)
    except re.error:  # a form that only the engine knows, such as \\p{L}: narrow it always
        return f"[{written}&&{_FEW_CONTROLS}]"
    if all(map(members.match, '"\\')) or not any(map(members.match, _CONTROLS)):
        return written
    return f"[{written}&&{_FEW_CONTROLS}]"


def _inside(part: str) -> str:
    if part == r"\s":
        return _BLANKS
    if part == r"\S":
        return f"[^{_BLANKS}]"
    if part == r"\b":
        return r"\x08"
    if part[0] != "\\":  # several characters: a group or a repeat has no meaning in a class
        return "".join(f"\\{c}" if c in "[&~^" or c in "{}()?" else c for c in part)
    return _escape(part)


def _escape(part: str) -> str:
    kind = part[1]
    if part[:3] == "\\u{":
        return part
    if kind in "ux" and len(part) > 2:
        code = int(part[2:], 16)
        if 0xD800 <= code < 0xE000:
            raise ValueError("surrogates are not supported; write the character itself")
        return f"\\u{{{code:x}}}"
    if kind == "c" and len(part) == 3:
        return f"\\x{ord(part[2].upper()) - 64:02x}"
    if kind == "0":
        return r"\x00"
    if kind in "pP" and len(part) > 2:
        return part
    if kind in _KEPT:
        return r"\x0b" if kind == "v" else part
    if kind in "bB" or kind.isdecimal() or kind == "k":
        raise ValueError("back-references and word boundaries are not supported")
    if kind.isalnum():
        raise ValueError(f"{part} is not supported")
    return part if kind in _SYNTAX else kind
