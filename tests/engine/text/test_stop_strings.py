import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.text.stop_strings import StopChecker


def run(pieces, stops, *, include=False, min_pieces=0):
    """Text given out per piece, and the match."""
    checker = StopChecker(stops, include=include)
    texts = []
    for index, piece in enumerate(pieces):
        checked = checker.feed(piece, armed=index + 1 >= min_pieces)
        texts.append(checked.text)
        if checked.matched is not None:
            return texts, checked.matched
    return [*texts, checker.flush()], None


@pytest.mark.parametrize(
    ("stops", "include", "text", "matched"),
    [
        (["NOPQRST"], False, "KLM", "NOPQRST"),
        (["NOPQRST"], True, "KLMNOPQRST", "NOPQRST"),
        (["NO"], False, "KLM", "NO"),
        (["NO"], True, "KLMNO", "NO"),
        (["123", "QR"], False, "KLMNOP", "QR"),
        (["123", "QR"], True, "KLMNOPQR", "QR"),
        (["XYZ", "MN"], False, "KL", "MN"),
        (["xyz"], False, "KLMNOPQRSTUVWXYZ", None),
    ],
)
@pytest.mark.parametrize("pieces", [list("KLMNOPQRSTUVWXYZ"), ["KLM", "NOP", "QRSTUV", "WXYZ"]])
def test_text_up_to_the_stop(pieces, stops, include, text, matched):
    texts, found = run(pieces, stops, include=include)
    assert ("".join(texts), found) == (text, matched)


def test_a_prefix_that_turns_out_no_match_is_released_as_soon_as_that_is_certain():
    texts, _ = run(["a", "<", "/", "b", "c"], ["</s>"])
    assert texts == ["a", "", "", "</b", "c", ""]


def test_what_is_held_at_the_end_is_text():
    assert run(["ab", "c"], ["cd"]) == (["ab", "", "c"], None)


def test_overlapping_beginnings():
    assert run(list("aaab"), ["aab"]) == (["", "", "a", ""], "aab")


def test_the_longest_of_those_complete_at_the_same_character_wins():
    assert run(["xabc"], ["bc", "abc", "c"]) == (["x"], "abc")


def test_no_stop_before_min_tokens_but_a_match_may_begin_there():
    assert run(list("abab"), ["ab"], min_pieces=3) == (["", "ab", "", ""], "ab")
    assert run(["a", "b", "c"], ["ab", "abc"], min_pieces=3) == (["", "", ""], "abc")
    assert run(["ab", "x"], ["ab", "abc"], min_pieces=2) == (["", "abx", ""], None)


texts_ = st.text("ab<", max_size=30)
stops_ = st.lists(st.text("ab<", min_size=1, max_size=4), max_size=4)


@given(texts_, stops_, st.booleans(), st.lists(st.integers(0, 30), max_size=8))
def test_the_result_depends_on_the_text_alone(text, stops, include, cuts):
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    given_out, matched = run(pieces, stops, include=include)
    expected, expected_match = _reference(text, stops, include)
    assert ("".join(given_out), matched) == (expected, expected_match)


@given(texts_, stops_)
def test_no_more_is_held_than_may_become_a_stop(text, stops):
    checker = StopChecker(stops)
    shown, seen = "", ""
    for char in text:
        seen += char
        checked = checker.feed(char)
        shown += checked.text
        if checked.matched is not None:
            return
        beginnings = [stop[:n] for stop in stops for n in range(1, len(stop))]
        held = max((len(b) for b in beginnings if seen.endswith(b)), default=0)
        assert shown == seen[: len(seen) - held]


def _reference(text, stops, include):
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None
