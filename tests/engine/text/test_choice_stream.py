"""One choice's deltas: text, ids and end do not depend on the grouping of tokens and reads."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from inferfleet_proto.v1 import inference_pb2
from services.common.text import Tokenizer
from services.common.text.byte_level import byte_assets
from services.engine.contract.messages import ChoiceOutput, TokenLogprobs
from services.engine.contract.sampling_params import SamplingParams
from services.engine.text.choice_stream import ChoiceStream

TOKENS = Tokenizer(byte_assets(added=["<think>", "</think>"]))
EOS, THINK, END_THINK = 258, 259, 260


def output(ids, end=None, matched=None, **parts):
    return ChoiceOutput("k", 0, list(ids), end, matched, **parts)


def stream(**params):
    return ChoiceStream(0, SamplingParams(**params), TOKENS, [65])


def drain(choice):
    delta = choice.take_delta()
    return delta if delta is not None else inference_pb2.Delta()


def test_an_end_token_is_in_the_ids_and_not_in_the_text():
    choice = stream()
    choice.add_output(output([*b"ok", EOS], "EOS", EOS))
    delta = drain(choice)
    assert (delta.text, list(delta.token_ids)) == ("ok", [*b"ok", EOS])
    assert choice.finished.reason == inference_pb2.FINISH_REASON_EOS


def test_a_stop_token_shows_only_if_it_was_requested():
    for include, text in ((False, "<think>ok"), (True, "<think>ok</think>")):
        choice = stream(stop_token_ids=(END_THINK,), include_stop_in_output=include)
        choice.add_output(output([THINK, *b"ok", END_THINK], "STOP_TOKEN", END_THINK))
        assert drain(choice).text == text
        assert choice.finished.stop_token_id == END_THINK


def test_an_added_token_as_a_stop_string():
    choice = stream(stop_strings=("</think>",))
    choice.add_output(output([THINK, *b"ok", END_THINK, *b"1"]))
    delta = drain(choice)
    assert (delta.text, list(delta.token_ids)) == ("<think>ok", [THINK, *b"ok", END_THINK])
    assert choice.finished.stop_string == "</think>"
    assert choice.num_tokens == 4


def test_held_back_text_is_sent_at_the_end():
    choice = stream(stop_strings=("xyz",))
    choice.add_output(output(b"axy"))
    assert drain(choice).text == "a"
    choice.add_output(output([0xC3], "MAX_TOKENS"))
    assert drain(choice).text == "xy\ufffd"


def test_no_stop_string_counts_before_min_tokens():
    choice = stream(stop_strings=("b",), min_tokens=3)
    choice.add_output(output(b"abab"))
    delta = drain(choice)
    assert (delta.text, bytes(delta.token_ids)) == ("aba", b"abab")
    assert choice.finished.stop_string == "b"


def test_a_delta_without_text_still_has_its_tokens():
    choice = stream(stop_strings=("ab",))
    choice.add_output(output(b"a"))
    delta = drain(choice)
    assert (delta.text, list(delta.token_ids), delta.num_tokens) == ("", [97], 1)
    assert choice.take_delta() is None


def test_logprobs_stay_aligned_when_a_stop_cuts_the_tokens():
    choice = stream(stop_strings=("b",), logprobs=True)
    entries = [TokenLogprobs(token, -1.0, []) for token in b"abc"]
    choice.add_output(output(b"abc", logprobs=entries))
    delta = drain(choice)
    assert list(delta.token_ids) == [97, 98]
    assert [entry.token_id for entry in delta.logprobs] == [97, 98]


def test_nothing_counts_after_the_end():
    choice = stream(stop_strings=("b",))
    choice.add_output(output(b"ab"))
    choice.add_output(output(b"more", "MAX_TOKENS"))
    assert choice.finished.stop_string == "b"
    assert list(drain(choice).token_ids) == list(b"ab")


def test_text_that_was_flushed_before_the_engine_died_is_not_sent_twice():
    whole = stream()
    whole.add_output(output(b"a\xc3", "MAX_TOKENS"))
    sent = drain(whole)
    assert sent.text == "a\ufffd"
    choice = stream()
    choice.replay(list(b"a\xc3"), len(sent.text.encode()))
    choice.add_output(output(b"", "MAX_TOKENS"))
    assert choice.take_delta() is None
    assert choice.num_tokens == 2


def test_a_choice_of_which_nothing_was_sent_still_begins_with_its_echo():
    choice = stream()
    choice.add_prompt("prompt ")
    choice.replay([], 0)
    choice.add_output(output(b"a"))
    assert drain(choice).text == "prompt a"
    again = stream()
    again.add_prompt("prompt ")
    again.replay(list(b"a"), len("prompt a"))
    again.add_output(output(b"b"))
    assert drain(again).text == "b"


ids_ = st.lists(st.sampled_from([*"aéb<中".encode(), THINK, END_THINK, 256]), max_size=24)
stops_ = st.lists(st.sampled_from(["a", "éb", "<", "<think>a", "中", "b<", "ab"]), max_size=3)
cuts_ = st.lists(st.integers(0, 24), max_size=6)


def run(ids, cuts, reads, continued=0, **params):
    """Text, ids and end; `continued` tokens come from another engine."""
    choice = stream(**params)
    choice.replay(ids[:continued])
    rest = ids[continued:]
    edges = sorted({0, len(rest), *(cut for cut in cuts if cut < len(rest))})
    text, out = "", []
    for number, (start, stop) in enumerate(itertools.pairwise(edges)):
        last = stop == len(rest)
        choice.add_output(output(rest[start:stop], "MAX_TOKENS" if last else None))
        if number % reads == 0:
            delta = drain(choice)
            text, out = text + delta.text, [*out, *delta.token_ids]
    delta = drain(choice)
    return text + delta.text, [*out, *delta.token_ids], choice.finished, choice.num_tokens


@given(ids_, stops_, cuts_, st.integers(1, 3), st.booleans(), st.integers(0, 6))
def test_the_grouping_of_tokens_changes_nothing(ids, stops, cuts, reads, include, min_tokens):
    params = {
        "stop_strings": tuple(stops),
        "include_stop_in_output": include,
        "min_tokens": min_tokens,
    }
    whole = run(ids, [], 1, **params)
    assert run(ids, cuts, reads, **params) == whole
    assert run(ids, range(25), 1, **params) == whole
    assert whole[3] == len(whole[1])


@given(ids_.filter(bool), stops_, st.data())
def test_another_engine_goes_on_where_one_left(ids, stops, data):
    params = {"stop_strings": tuple(stops)}
    text, out, end, count = run(ids, [], 1, **params)
    place = data.draw(st.integers(0, max(0, len(out) - 1)))
    first = stream(**params)
    first.add_output(output(ids[:place]))
    sent = drain(first).text
    more, rest, again, total = run(ids, [], 1, continued=place, **params)
    assert (sent + more, ids[:place] + rest, again, total) == (text, out, end, count)
