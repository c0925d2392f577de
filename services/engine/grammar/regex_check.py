"""Checks regular expressions for what the grammar compiler cannot compile or reads differently.

The compiler copies counted repeats, fails above 128 copies, and misreads look-around and
back-references. Such patterns are refused here with the reason.
"""

import re
import warnings

MAX_REGEX_CHARS = 4096
MAX_REPEAT = 128
MAX_COPIES = 4096
MAX_CLASSES = 128
"""Compiling one wide class takes milliseconds."""
_COUNTED = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_CLASS = re.compile(r"\[\^?\]?[^\]]*\]")
_TOKEN = re.compile(r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|\[(?:\\.|[^\]\\])+\]|.", re.DOTALL)
_FOREIGN = re.compile(r"\\[AZaNU]|\\0[0-9]|\(\?[aiLmsux-]")
_POSSESSIVE = re.compile(r"[*+?}]\+")
"""Possessive repeats: Python's own, the compiler misreads or refuses them."""
_UNSUPPORTED = (
    ("(?=", "look-ahead is not supported"),
    ("(?!", "look-ahead is not supported"),
    ("(?<=", "look-behind is not supported"),
    ("(?<!", "look-behind is not supported"),
)


def regex_problem(pattern: object) -> str | None:
    """Why a pattern is refused; None if it is accepted."""
    if not isinstance(pattern, str):
        return "must be a string"
    if len(pattern) > MAX_REGEX_CHARS:
        return f"has more than {MAX_REGEX_CHARS} characters"
    if pattern.count("[") > MAX_CLASSES:
        return f"has more than {MAX_CLASSES} character classes"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about syntax that a later Python may read differently
            re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return f"is not a valid regular expression: {error}"
    for sign, problem in _UNSUPPORTED:
        if sign in pattern:
            return problem
    without = pattern.replace("\\\\", "")
    if re.search(r"\\[1-9bB]", without):
        return "back-references and word boundaries are not supported"
    if found := _FOREIGN.search(without):
        return f"{found.group()} is not supported"
    plain = _CLASS.sub("c", _ESCAPED.sub("e", pattern))
    if _POSSESSIVE.search(plain):
        return "possessive repeats are not supported"
    return _anchor_problem(plain) or _repeat_problem(plain)


def json_pattern_problem(pattern: object) -> str | None:
    """Why a pattern for a JSON string is refused; None if it is accepted.

    The compiler does not escape the characters that a pattern matches, although JSON requires it
    for some. It handles them correctly in a class of several members.
    """
    problem = regex_problem(pattern)
    if problem is not None or not isinstance(pattern, str):
        return problem
    for token in _TOKEN.findall(pattern):
        is_class = token[0] == "[" and len(token) > 1
        members = _TOKEN.findall(token[1:-1]) if is_class else [token]
        if members[:1] != ["^"] and all(map(_must_be_escaped, members)):
            return "cannot hold a quotation mark, backslash or control character"
    return None


def _must_be_escaped(token: str) -> bool:
    if token[0] != "\\":
        return token == '"' or ord(token[0]) < 0x20
    if len(token) > 2:
        code = int(token[2:], 16)
        return code < 0x20 or code in (0x22, 0x5C)
    return token[1] in '"\\nrtfv0' or ord(token[1]) < 0x20


def _anchor_problem(plain: str) -> str | None:
    """Refuse anchors except at the ends of the pattern or of its outermost branches.

    Elsewhere the compiler ignores them, so a pattern that cannot match would match.
    """
    depth = 0
    for position, character in enumerate(plain):
        depth += (character == "(") - (character == ")")
        before, after = plain[:position], plain[position + 1 :]
        if character == "^" and (depth or (before and before[-1] != "|")):
            return "^ is supported at the beginning only"
        if character == "$" and (depth or (after and after[0] != "|")):
            return "$ is supported at the end only"
    return None


def _repeat_problem(plain: str) -> str | None:
    """Refuse a counted repeat, or a product of nested ones, beyond the limit."""
    depth_copies = [1]
    position = 0
    while position < len(plain):
        counted = _COUNTED.match(plain, position)
        if plain[position] == "(":
            depth_copies.append(1)
        elif plain[position] == ")" and len(depth_copies) > 1:
            inner = depth_copies.pop()
            after = _COUNTED.match(plain, position + 1)
            inner *= _most(after) if after else 1
            depth_copies[-1] = max(depth_copies[-1], inner)
        elif counted:
            most = _most(counted)
            if most > MAX_REPEAT:
                return f"repeats more than {MAX_REPEAT} times"
            depth_copies[-1] = max(depth_copies[-1], most)
            position = counted.end() - 1
        position += 1
    if max(depth_copies) > MAX_COPIES:
        return f"nested repeats make more than {MAX_COPIES} copies"
    return None


def _most(counted: "re.Match[str]") -> int:
    low, high = counted.group(1), counted.group(2)
    return max(int(low), int(high) if high else 0, 1)
