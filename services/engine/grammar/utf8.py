"""Finds tokens that would make the answer invalid UTF-8.

The compiler's character classes include surrogates (ED A0 80 …) and, in patterns, overlong
encodings (E0 80 80 …). A client would get replacement characters, possibly more than `maxLength`.
"""

import re
from collections.abc import Sequence

_BAD_SECOND = {
    0xE0: range(0x80, 0xA0),
    0xED: range(0xA0, 0xC0),
    0xF0: range(0x80, 0x90),
    0xF4: range(0x90, 0xC0),
}
_BROKEN = re.compile(rb"\xe0[\x80-\x9f]|\xed[\xa0-\xbf]|\xf0[\x80-\x8f]|\xf4[\x90-\xbf]")


def broken_tokens(vocabulary: Sequence[bytes]) -> list[int]:
    """Ids of tokens that contain bytes of no valid UTF-8."""
    return [i for i, word in enumerate(vocabulary) if _BROKEN.search(word)]


def pending_tokens(vocabulary: Sequence[bytes]) -> dict[int, list[int]]:
    """By lead byte that restricts the next byte: ids of the tokens that end in it."""
    ends: dict[int, list[int]] = {lead: [] for lead in _BAD_SECOND}
    for token_id, word in enumerate(vocabulary):
        if word and word[-1] in ends:
            ends[word[-1]].append(token_id)
    return ends


def breaking_tokens(vocabulary: Sequence[bytes]) -> dict[int, list[int]]:
    """By the same lead byte: ids of the tokens that begin with a byte that must not follow it."""
    begins: dict[int, list[int]] = {lead: [] for lead in _BAD_SECOND}
    for token_id, word in enumerate(vocabulary):
        if word and 0x80 <= word[0] < 0xC0:
            for lead, bad in _BAD_SECOND.items():
                if word[0] in bad:
                    begins[lead].append(token_id)
    return begins
