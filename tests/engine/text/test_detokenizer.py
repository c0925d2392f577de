import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.text import Tokenizer
from services.common.text.byte_level import byte_assets
from services.engine.text.detokenizer import Detokenizer

VECTORS = json.loads((Path(__file__).parents[2] / "data" / "detokenizer.json").read_text())


class Pieces:
    """A tokenizer whose id n is the n-th piece."""

    def __init__(self, pieces: list[bytes], special: frozenset[int] = frozenset()) -> None:
        self._pieces = pieces
        self._special = special

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special


def texts(detokenizer: Detokenizer, ids: range | list[int]) -> list[str]:
    return [*(detokenizer.feed(i) for i in ids), detokenizer.flush()]


@pytest.mark.parametrize("vector", VECTORS["vectors"], ids=lambda v: v["id"])
def test_vectors_of_cut_characters(vector):
    prompt = [bytes.fromhex(h) for h in vector.get("prompt_tokens_hex", [])]
    tokens = [bytes.fromhex(h) for h in vector["tokens_hex"]]
    ids = range(len(prompt), len(prompt) + len(tokens))
    deltas = texts(Detokenizer(Pieces(prompt + tokens), range(len(prompt))), ids)
    joined = "".join(deltas)
    for delta in deltas:
        delta.encode()  # no lone surrogates
        if vector.get("no_ufffd"):
            assert "\ufffd" not in delta
    for forbidden in vector.get("forbidden_substrings", []):
        assert forbidden not in joined
    if "final" in vector:
        assert joined == vector["final"]
    if "must_end_with" in vector:
        assert joined.endswith(vector["must_end_with"])
    allowed = vector.get("allowed_joined") or vector.get("final_any_of")
    assert allowed is None or joined in allowed


def test_the_prompt_s_half_character_is_completed_by_the_output():
    tokens = Pieces([b"\xf0\x9f", b"\x8c\xb6", b"!"])
    assert texts(Detokenizer(tokens, [0]), [1, 2]) == ["🌶", "!", ""]


def test_a_half_character_of_the_prompt_that_is_not_gone_on_with_is_not_shown():
    tokens = Pieces([b"\xf0\x9f", b"ab", b"\xc3\xa9"])
    assert texts(Detokenizer(tokens, [0]), [1]) == ["ab", ""]
    assert texts(Detokenizer(tokens, [0]), [2]) == ["é", ""]


def test_a_special_token_ends_the_prompt_s_half_character():
    tokens = Pieces([b"\xf0\x9f", b"<s>", b"\x8c"], special=frozenset({1}))
    assert texts(Detokenizer(tokens, [0, 1]), [2]) == ["\ufffd", ""]


def test_a_hidden_end_token_does_not_cut_a_character_short():
    tokens = Pieces([b"\xc3", b"\xa9", b"<end>"], special=frozenset({2}))
    assert texts(Detokenizer(tokens), [0, 2, 1]) == ["", "", "é", ""]
    detokenizer = Detokenizer(tokens)
    assert detokenizer.feed(2, shown=False) == ""


def test_added_tokens_show_unless_they_are_special():
    tokenizer = Tokenizer(byte_assets(special=["<|im_end|>"], added=["<think>", "</think>"]))
    ids = [*[257], *b"ok", *[258], *b"1", 256]
    assert "".join(texts(Detokenizer(tokenizer), ids)) == "<think>ok</think>1"


@given(st.text(max_size=40), st.lists(st.integers(0, 160), max_size=20), st.data())
def test_any_cut_of_any_text_gives_that_text(text, cuts, data):
    raw = text.encode()
    places = sorted({0, len(raw), *(cut for cut in cuts if cut < len(raw))})
    pieces = [raw[a:b] for a, b in pairwise(places)]
    prompt = data.draw(st.integers(0, len(pieces)))
    deltas = texts(Detokenizer(Pieces(pieces), range(prompt)), range(prompt, len(pieces)))
    shown = "".join(deltas)
    assert "\ufffd" not in shown or "\ufffd" in text
    start = places[prompt] if pieces else 0
    assert text.endswith(shown)
    assert len(shown.encode()) - len(raw[start:]) in range(4)


@given(st.lists(st.binary(max_size=5), max_size=12))
def test_any_bytes_give_what_the_whole_decodes_to(pieces):
    deltas = texts(Detokenizer(Pieces(pieces)), range(len(pieces)))
    assert "".join(deltas) == b"".join(pieces).decode(errors="replace")


def test_a_special_token_shows_only_to_who_reads_it():
    tokens = Pieces([b"a", b"[CALL]", b"[END]"], special=frozenset({1, 2}))
    assert "".join(texts(Detokenizer(tokens), [0, 1, 2])) == "a"
    shown = Detokenizer(tokens, (), frozenset({1}))
    assert "".join(texts(shown, [0, 1, 2])) == "a[CALL]"
    assert shown.feed(1, shown=False) == ""
