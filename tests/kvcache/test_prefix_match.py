"""Prefixes beside the plain definition: walk each owner's blocks until one is missing."""

from hypothesis import given
from hypothesis import strategies as st

from services.kvcache.events import HISTORY, STATE
from services.kvcache.prefix_match import PrefixMatch

TOKENS = [bytes([i]) * 6 for i in range(1, 6)]
NAMES = {token: f"1 {i}".encode() for i, token in enumerate(TOKENS[:3])} | {TOKENS[3]: b""}
"""Three lives, a snapshot under way, and one token (the last) of a life that has ended."""
KINDS = st.sampled_from([HISTORY, STATE, HISTORY | STATE])
ROWS = st.dictionaries(st.sampled_from(TOKENS), KINDS)
PROMPTS = st.lists(st.tuples(ROWS, st.integers(1, 3)), max_size=12).map(
    lambda runs: [rows for rows, times in runs for _ in range(times)]
)


def entry(rows: dict[bytes, int]) -> bytes | None:
    return b"".join(token + bytes([kinds]) for token, kinds in rows.items()) or None


def plainly(prompt: list[dict[bytes, int]], needs_state: bool) -> dict[bytes, int]:
    found = {}
    for token, name in NAMES.items():
        for depth, rows in enumerate(prompt, 1):
            kinds = rows.get(token, 0)
            if not name or not kinds & HISTORY:
                break
            if kinds & STATE or not needs_state:
                found[name] = depth
    return found


@given(PROMPTS, st.booleans(), st.integers(1, 5))
def test_it_agrees_with_the_definition_however_the_prompt_is_cut(prompt, needs_state, step):
    match = PrefixMatch(NAMES, needs_state)
    for start in range(0, len(prompt), step):
        if not match.open:
            break
        match.add_entries([entry(rows) for rows in prompt[start : start + step]])
    found = match.result()
    assert dict(found) == plainly(prompt, needs_state)
    assert len(found) == len(dict(found)), "no engine twice"


def test_it_is_closed_as_soon_as_no_engine_holds_all_blocks():
    row = TOKENS[0] + bytes([HISTORY])
    match = PrefixMatch(NAMES, needs_state=False)
    match.add_entries([row, row])
    assert match.open
    match.add_entries([None, row])
    assert not match.open
    match.add_entries([row])
    assert match.result() == [(NAMES[TOKENS[0]], 2)]
    assert not PrefixMatch({}, needs_state=False).open
