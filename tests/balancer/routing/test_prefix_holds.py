"""Prefixes of running requests: counted per engine life, searched exactly, released once."""

from hypothesis import given
from hypothesis import strategies as st

from services.balancer.engines.engine_view import EngineState, EngineView
from services.balancer.routing.prefix_holds import PrefixHolds
from services.balancer.routing.prefix_match import Matches
from services.common import block_hash

A, B = ("a", 1), ("b", 1)


def chain(tokens, block_size=2):
    """Joined hashes of a prompt, as a balancer makes them."""
    blocks = block_hash.hash_blocks(
        block_hash.root(b"space"), tokens, block_size, len(tokens) // block_size
    )
    return block_hash.join_for_index(blocks)


prompts = st.lists(st.integers(0, 1), max_size=12)


def common_blocks(one, other):
    blocks = 0
    while 2 * blocks + 2 <= min(len(one), len(other)):
        if one[: 2 * blocks + 2] != other[: 2 * blocks + 2]:
            break
        blocks += 1
    return blocks


@given(running=st.lists(prompts, max_size=6), prompt=prompts, ended=st.sets(st.integers(0, 5)))
def test_the_search_finds_what_a_walk_would(running, prompt, ended):
    holds = PrefixHolds()
    releases = [holds.hold(A, chain(other)) for other in running]
    left = [other for i, other in enumerate(running) if i not in ended]
    for i in ended:
        if i < len(releases):
            releases[i]()
            releases[i]()
    assert holds.matched(A, chain(prompt)) == max(
        (common_blocks(other, prompt) for other in left), default=0
    )
    assert holds.matched(B, chain(prompt)) == 0
    for release in releases:
        release()
    assert holds.empty


def test_a_restarted_engine_holds_nothing_of_its_earlier_life():
    holds = PrefixHolds()
    release = holds.hold(("a", 1), chain([1, 2, 3, 4]))
    assert holds.matched(("a", 2), chain([1, 2, 3, 4])) == 0
    again = holds.hold(("a", 2), chain([1, 2]))
    release()
    assert holds.matched(("a", 2), chain([1, 2, 3, 4])) == 1
    again()
    assert holds.empty


def test_a_match_is_the_longer_of_index_and_running_requests():
    holds, prompt = PrefixHolds(), chain([1, 2, 3, 4, 5, 6])
    holds.hold(A, prompt[: 2 * block_hash.INDEX_HASH_BYTES])
    facts = {"state": EngineState.SERVING, "hash_namespace": b"space", "block_size": 2}
    engines = [EngineView(name, 1, "m", **facts) for name in "abc"]
    matches = Matches(True, {A: 2, B: 6}, {(b"space", 2): prompt}, holds)
    assert [matches.matched_tokens(engine) for engine in engines] == [4, 6, 0]
