"""Deltas that arrive together become one message of the same stream."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from inferfleet_proto.v1 import inference_pb2
from services.gateway.request.joining import join_deltas

Response = inference_pb2.GenerateResponse


def delta(**fields: Any) -> bytes:
    fields.setdefault("num_tokens", len(fields.get("token_ids", ())))
    return Response(delta=inference_pb2.Delta(**fields)).SerializeToString()


def call(**fields: Any) -> bytes:
    return Response(delta={"tool_call": fields, "num_tokens": 1}).SerializeToString()


def summed(messages: list[bytes]) -> dict[int, list[Any]]:
    """Each choice piece by piece, wherever its messages were cut, and what is no delta in all."""
    pieces: dict[int, list[Any]] = {0: [], 1: []}
    for raw in messages:
        message = Response.FromString(raw)
        event = message.WhichOneof("event")
        if event != "delta":
            for choice in pieces.values():
                choice.append((event, raw))
            continue
        d, seen = message.delta, pieces[message.delta.choice]
        seen += [("char", c) for c in d.text]
        seen += [("thought", c) for c in d.reasoning]
        if d.WhichOneof("content") == "tool_call":
            seen.append(("call", d.tool_call.SerializeToString()))
    return pieces


def counted(messages: list[bytes]) -> dict[int, Any]:
    """Tokens, their number and log probabilities of each choice."""
    counts: dict[int, Any] = {}
    for raw in messages:
        d = Response.FromString(raw).delta
        ids, number, probabilities = counts.get(d.choice, ([], 0, []))
        more = [entry.logprob for entry in d.logprobs]
        counts[d.choice] = [*ids, *d.token_ids], number + d.num_tokens, [*probabilities, *more]
    return counts


TEXTS = st.text(alphabet="aé🌶 ", max_size=3)
DELTAS = st.builds(
    lambda choice, kind, text, ids: delta(
        choice=choice,
        token_ids=ids,
        logprobs=[inference_pb2.TokenLogprob(token_id=i, logprob=-i / 8) for i in ids],
        **({kind: text} if kind else {}),
    ),
    st.integers(0, 1),
    st.sampled_from(["text", "reasoning", ""]),
    TEXTS,
    st.lists(st.integers(0, 200_000), max_size=3),
)
OTHERS = st.sampled_from(
    [
        Response(started={"request_id": "r"}).SerializeToString(),
        Response(finished={"choice": 1}).SerializeToString(),
        Response(summary={"exact": True}).SerializeToString(),
        call(id="c", name="f"),
        call(arguments="{}"),
    ]
)


@given(st.lists(st.one_of(DELTAS, DELTAS, DELTAS, OTHERS), max_size=12))
def test_joined_messages_are_the_same_stream(messages):
    out = list(join_deltas(messages))
    assert summed(out) == summed(messages)
    assert counted(out) == counted(messages)
    assert len(out) <= len(messages)
    assert list(join_deltas(out)) == out


def test_deltas_of_one_choice_become_one():
    assert list(join_deltas([delta(text=t, token_ids=[i]) for i, t in enumerate("abc")])) == [
        delta(text="abc", token_ids=[0, 1, 2])
    ]


def test_choices_by_turns_become_one_each():
    turns = [delta(choice=c, text=t, token_ids=[i]) for i, t in enumerate("ab") for c in (0, 1)]
    assert list(join_deltas(turns)) == [
        delta(choice=c, text="ab", token_ids=[0, 1]) for c in (0, 1)
    ]


def test_a_lone_message_is_passed_on_as_it_is():
    odd = b"\x12\x03\x28\x01\x40"  # not even a whole one
    assert list(join_deltas([odd])) == [odd]


def test_choices_kinds_and_calls_stay_apart():
    messages = [
        delta(text="a", token_ids=[1]),
        delta(choice=1, text="b", token_ids=[2]),
        delta(choice=1, reasoning="c", token_ids=[3]),
        call(id="c", name="f"),
        call(arguments="{}"),
    ]
    assert list(join_deltas(messages)) == messages
