"""Which regular expressions the grammar compiler takes without crashing or exploding.

It compiles counted repeats by copying, stops at an internal check above 128 copies, and reads
look-around and back-references as something else; those are refused here with the reason.
"""

import re

MAX_REGEX_CHARS = 4096
MAX_REPEAT = 128
MAX_COPIES = 4096
MAX_CLASSES = 128
"""Checking one wide class takes milliseconds."""
_COUNTED = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_CLASS = re.compile(r"\[\^?\]?[^\]]*\]")
_UNSUPPORTED = (
    ("(?=", "look-ahead is not supported"),
    ("(?!", "look-ahead is not supported"),
    ("(?<=", "look-behind is not supported"),
    ("(?<!", "look-behind is not supported"),
)


def regex_problem(pattern: object) -> str | None:
    """What is wrong with a pattern, or None."""
    if not isinstance(pattern, str):
        return "must be a string"
    if len(pattern) > MAX_REGEX_CHARS:
        return f"has more than {MAX_REGEX_CHARS} characters"
    if pattern.count("[") > MAX_CLASSES:
        return f"has more than {MAX_CLASSES} character classes"
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return f"is not a valid regular expression: {error}"
    for sign, problem in _UNSUPPORTED:
        if sign in pattern:
            return problem
    if re.search(r"\\[1-9bB]", pattern.replace("\\\\", "")):
        return "back-references and word boundaries are not supported"
    return _repeat_problem(pattern)


def _repeat_problem(pattern: str) -> str | None:
    """Bound every counted repeat, and the product of nested ones."""
    plain = _CLASS.sub("c", _ESCAPED.sub("e", pattern))
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
