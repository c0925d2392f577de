"""Masks keep the text whole UTF-8, also where the grammar would take bytes that are none."""

import pytest

from services.engine.contract.sampling_params import Constraint
from services.engine.grammar.utf8 import breaking_tokens, broken_tokens, pending_tokens

pytestmark = pytest.mark.timeout(240)


def whole(first: int, second: int) -> bool:
    for rest in (b"", b"\x80", b"\x80\x80"):
        try:
            return bool((bytes([first, second]) + rest).decode())
        except UnicodeDecodeError:
            continue
    return False


@pytest.mark.parametrize("kind", ["regex", "json_schema"])
def test_after_each_first_byte_only_second_ones_of_a_character(wait_for, allowed_ids, kind):
    text, start = (".*", b"") if kind == "regex" else ('{"pattern": "^[^a]*$"}', b'"')
    built = wait_for(Constraint(kind, text))
    for first in (0xC3, 0xE0, 0xE1, 0xED, 0xEE, 0xF0, 0xF1, 0xF4):
        matcher = built.grammar.matcher()
        assert matcher.replay([*start, first])
        expected = {second for second in range(0x80, 0xC0) if whole(first, second)}
        assert allowed_ids(matcher) & set(range(0x80, 0xC0)) == expected, hex(first)


def test_tokens_of_several_bytes_are_seen_by_their_ends_and_middles():
    words = [b"a", b"x\xed", b"\xa0\x80", b"\x80", b"\xed\xa0\x80", "\ud7ff".encode(), b"\xf4", b""]
    assert broken_tokens(words) == [4]
    assert {lead: ids for lead, ids in pending_tokens(words).items() if ids} == {
        0xED: [1],
        0xF4: [6],
    }
    assert breaking_tokens(words) == {0xE0: [3], 0xED: [2], 0xF0: [3], 0xF4: [2]}
