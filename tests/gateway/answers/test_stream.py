"""AnswerStream: every token is sent exactly once, with or without its text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferfleet_proto.v1 import inference_pb2 as pb
from services.gateway.answers.hermes import HermesParser
from services.gateway.answers.reasoning import THINK
from services.gateway.answers.stream import AnswerParsing

TEXT = 'hm\n</think>\nWell. <tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def parsing(**keys):
    given_keys = {
        "marks": THINK,
        "start": "open",
        "make_call_parser": HermesParser,
        "max_calls": None,
    }
    return AnswerParsing(**{**given_keys, **keys}, token_bytes=lambda token_id: bytes([token_id]))


def through(keys, sizes, text=TEXT, choice=0, reason="EOS"):
    """All messages of a stream whose tokens are bytes, in groups of these sizes."""
    stream = parsing(**keys).open_stream()
    raw, out, place, turn = text.encode(), [], 0, 0
    while place < len(raw):
        ids = raw[place : place + sizes[turn % len(sizes)]]
        delta = pb.Delta(choice=choice, text=ids.decode(), token_ids=ids, num_tokens=len(ids))
        for token_id in ids:
            delta.logprobs.add(token_id=token_id)
        out += stream.parse(pb.GenerateResponse(delta=delta).SerializeToString())
        place, turn = place + len(ids), turn + 1
    finished = {"choice": choice, "reason": f"FINISH_REASON_{reason}"}
    out += stream.parse(pb.GenerateResponse(finished=finished).SerializeToString())
    usage = pb.Usage(completion_tokens=len(raw))
    out += stream.parse(pb.GenerateResponse(summary={"usage": usage}).SerializeToString())
    return [pb.GenerateResponse.FromString(raw) for raw in out]


@settings(max_examples=40)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_any_grouping_of_tokens(sizes):
    events = through({}, sizes)
    deltas = [event.delta for event in events if event.HasField("delta")]
    ids = [token_id for delta in deltas for token_id in delta.token_ids]
    assert bytes(ids).decode() == TEXT
    assert [entry.token_id for delta in deltas for entry in delta.logprobs] == ids
    assert sum(delta.num_tokens for delta in deltas) == len(ids)
    assert "".join(delta.reasoning for delta in deltas) == "hm"
    assert "".join(delta.text for delta in deltas) == "Well."
    calls = [delta.tool_call for delta in deltas if delta.WhichOneof("content") == "tool_call"]
    assert [call.name for call in calls if call.name] == ["f"]
    assert "".join(call.arguments for call in calls) == '{"a": 1}'
    assert events[-1].summary.usage.reasoning_tokens == len("hm\n</think>")
    assert [e.WhichOneof("event") for e in events[-2:]] == ["finished", "summary"]


def test_tokens_are_sent_at_once_while_their_text_is_held_back():
    stream = parsing(start="closed").open_stream()
    raw = pb.GenerateResponse(delta={"text": "<tool", "token_ids": b"<tool", "num_tokens": 5})
    (out,) = stream.parse(raw.SerializeToString())
    delta = pb.GenerateResponse.FromString(out).delta
    assert (delta.text, bytes(delta.token_ids), delta.num_tokens) == ("", b"<tool", 5)


@pytest.mark.parametrize("most", [1, 2])
def test_calls_beyond_the_limit_are_dropped(most):
    one = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    events = through({"start": "closed", "max_calls": most}, [4], one * 3)
    calls = [e.delta.tool_call for e in events if e.delta.WhichOneof("content") == "tool_call"]
    assert len({call.id for call in calls if call.id}) == most
    assert max(call.index for call in calls) == most - 1


def test_answer_tokens_are_not_counted_as_reasoning():
    events = through({"start": "free"}, [3], "Just an answer.")
    assert events[-1].summary.usage.reasoning_tokens == 0


def test_reasoning_that_was_cut_is_counted_whole():
    events = through({}, [2], "hm, and")
    assert events[-1].summary.usage.reasoning_tokens == len("hm, and")


def test_short_ids_for_mistral():
    one = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    events = through({"start": "closed", "short_ids": True}, [9], one)
    (call_id,) = {e.delta.tool_call.id for e in events if e.delta.tool_call.id}
    assert len(call_id) == 9
    assert call_id.isalnum()


def content(events):
    return "".join(event.delta.text for event in events if event.HasField("delta"))


def call_names(events):
    return [e.delta.tool_call.name for e in events if e.delta.tool_call.name]


FIRST = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
CUT = ["MAX_TOKENS", "CONTEXT_FULL"]


@pytest.mark.parametrize("start", ["closed", "free"])
@pytest.mark.parametrize("reason", CUT)
def test_a_required_call_shows_no_part_of_its_frame(start, reason):
    """At any length; with a model that may reason first as well."""
    for length in range(1, len(FIRST)):
        keys = {"start": start, "calls_only": True}
        events = through(keys, [3], FIRST[:length], reason=reason)
        assert content(events) == "", length
        assert call_names(events) in ([], ["f"])


@pytest.mark.parametrize("required", [True, False])
@pytest.mark.parametrize("reason", CUT)
def test_a_second_call_that_was_cut_shows_none_either(required, reason):
    for length in range(len(FIRST), 2 * len(FIRST)):
        keys = {"start": "closed", "calls_only": required}
        events = through(keys, [4], (FIRST * 2)[:length], reason=reason)
        assert content(events) == "", length
        assert call_names(events)[0] == "f"


@pytest.mark.parametrize(
    ("text", "reason", "shown"),
    [
        ("Well. <tool_ca", "MAX_TOKENS", "Well."),
        ("<tool_call", "CONTEXT_FULL", ""),
        ("<tool_call", "EOS", "<tool_call"),
        ("Well. <tool_ca", "STOP_STRING", "Well. <tool_ca"),
        ("a <", "MAX_TOKENS", "a <"),
        (FIRST + "a <", "MAX_TOKENS", "a <"),
        (FIRST + "<", "EOS", "<"),
        ("a < b", "MAX_TOKENS", "a < b"),
    ],
)
def test_the_beginning_of_a_mark_in_a_free_answer(text, reason, shown):
    assert content(through({"start": "closed"}, [5], text, reason=reason)) == shown


def test_reasoning_that_was_cut_has_no_piece_of_its_end_mark():
    events = through({}, [3], "hm</thi", reason="MAX_TOKENS")
    assert "".join(event.delta.reasoning for event in events) == "hm"
    events = through({"start": "free"}, [3], "<thi", reason="MAX_TOKENS")
    assert content(events) == ""
