"""Which tokens would break UTF-8: grammars count characters, and some take bytes that are none.

The compiler's classes hold the surrogates (ED A0 80 …) and, in patterns, longer spellings than
needed (E0 80 80 …). A reader gets replacement characters for them, perhaps more than `maxLength`.
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
    """Ids of tokens that are no part of any text."""
    return [i for i, word in enumerate(vocabulary) if _BROKEN.search(word)]


def pending_tokens(vocabulary: Sequence[bytes]) -> dict[int, list[int]]:
    """For each first byte that not every second one may follow, the ids of tokens ending in it."""
    ends: dict[int, list[int]] = {lead: [] for lead in _BAD_SECOND}
    for token_id, word in enumerate(vocabulary):
        if word and word[-1] in ends:
            ends[word[-1]].append(token_id)
    return ends


def breaking_tokens(vocabulary: Sequence[bytes]) -> dict[int, list[int]]:
    """For each such byte, the ids of tokens that begin with a second one that may not follow."""
    begins: dict[int, list[int]] = {lead: [] for lead in _BAD_SECOND}
    for token_id, word in enumerate(vocabulary):
        if word and 0x80 <= word[0] < 0xC0:
            for lead, bad in _BAD_SECOND.items():
                if word[0] in bad:
                    begins[lead].append(token_id)
    return begins
