"""A stream cut anywhere and carried on looks to its client like one that nothing disturbed."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferfleet_proto.internal.v1 import engine_pb2
from inferfleet_proto.v1 import inference_pb2
from services.common.errors import InternalError
from services.common.rpc.continuation import StreamLedger

CHOICES = 2
TOKENS = (5, 3)
"""Per choice."""


def engine(known: engine_pb2.Continuation | None, group: int = 1) -> list[bytes]:
    """A deterministic engine's messages: `group` tokens a delta, text held until the next token."""
    so_far = {c.index: c for c in (known.choices if known else ())}
    events = [
        inference_pb2.GenerateResponse(
            started=inference_pb2.Started(prompt_tokens=9, cached_tokens=4 if known is None else 8)
        )
    ]
    streams = [_choice(c, so_far.get(c, engine_pb2.ContinuedChoice()), group) for c in range(2)]
    for pair in itertools.zip_longest(*streams):
        events.extend(event for event in pair if event is not None)
    usage = inference_pb2.Usage(prompt_tokens=9, cached_tokens=8, completion_tokens=99)
    events.append(
        inference_pb2.GenerateResponse(
            summary=inference_pb2.Summary(usage=usage, exact=True, engine_id="e")
        )
    )
    return [event.SerializeToString() for event in events]


def _choice(choice, so_far, group):
    if so_far.finished:
        return
    text_so_far = ""
    ids = [100 * choice + i for i in range(TOKENS[choice])]
    # The text of a token comes out with the next one; the last delta says all.
    parts = ["", *(f"{i}é" for i in ids[:-1])]
    parts[-1] += f"{ids[-1]}é."
    delta = inference_pb2.Delta(choice=choice)
    for position, part in enumerate(parts):
        text_so_far += part
        if position < len(so_far.token_ids):
            continue
        delta.token_ids.append(ids[position])
        if len(delta.token_ids) == group or position == len(ids) - 1:
            raw = text_so_far.encode()[so_far.sent_text_bytes :]
            delta.text = raw[delta_sent(delta, choice, so_far, position, group) :].decode()
            delta.num_tokens = len(delta.token_ids)
            yield inference_pb2.GenerateResponse(delta=delta)
            delta = inference_pb2.Delta(choice=choice)
    yield inference_pb2.GenerateResponse(finished=inference_pb2.Finished(choice=choice, reason=4))


def delta_sent(delta, choice, so_far, position, group):
    """Bytes of the earlier deltas of this stream."""
    first = position - len(delta.token_ids)
    ids = [100 * choice + i for i in range(TOKENS[choice])]
    parts = ["", *(f"{i}é" for i in ids[:-1])]
    earlier = len("".join(parts[: first + 1]).encode())
    return max(earlier - so_far.sent_text_bytes, 0)


def seen(messages):
    """What the client makes of the messages."""
    view = {"started": 0, "text": ["", ""], "ids": [[], []], "finished": [0, 0], "summary": None}
    for raw in messages:
        message = inference_pb2.GenerateResponse.FromString(raw)
        assert view["summary"] is None, "nothing may follow the Summary"
        if message.HasField("started"):
            view["started"] += 1
            view["cached"] = message.started.cached_tokens
        elif message.HasField("delta"):
            choice = message.delta.choice
            view["text"][choice] += message.delta.text
            view["ids"][choice] += list(message.delta.token_ids)
        elif message.HasField("finished"):
            view["finished"][message.finished.choice] += 1
        else:
            view["summary"] = message.summary
    return view


def carried(cuts, groups, max_raw_bytes, exact=True):
    """The client's messages when source after source breaks after the given number of messages."""
    ledger = StreamLedger(CHOICES, max_raw_bytes=max_raw_bytes)
    client: list[bytes] = []
    for cut, group in itertools.zip_longest(cuts, groups[: len(cuts) + 1]):
        source = engine(ledger.continuation(), group or 1)
        for number, raw in enumerate(source[:cut]):
            if number == 0:
                ledger.resume(exact=exact)
            out = ledger.accept(raw)
            if out is not None:
                client.append(out)
        if ledger.complete:
            break
        closing = ledger.closing() if not ledger.empty else None
        if closing is not None:
            client.append(closing)
            break
    return client, ledger


@given(
    cuts=st.lists(st.integers(0, 14), max_size=5),
    groups=st.lists(st.integers(1, 3), min_size=6, max_size=6),
    max_raw_bytes=st.sampled_from([0, 40, 10_000]),
)
def test_any_cuts_give_the_undisturbed_stream(cuts, groups, max_raw_bytes):
    client, ledger = carried(cuts, groups, max_raw_bytes)
    view, plain = seen(client), seen(engine(None))
    for key in ("started", "text", "ids", "finished", "cached"):
        assert view[key] == plain[key], key
    assert view["summary"] is not None
    assert ledger.complete
    if view["summary"].continuations:
        assert view["summary"].usage.completion_tokens == sum(TOKENS)
        assert view["summary"].usage.cached_tokens == 4
    assert view["summary"].exact
    assert view["summary"].continuations <= len(cuts)


def test_an_undisturbed_stream_is_passed_on_as_it_is():
    source = engine(None)
    ledger = StreamLedger(CHOICES)
    assert [ledger.accept(raw) for raw in source] == source
    assert ledger.complete
    assert ledger.summary.usage.completion_tokens == 99, "the engine's own, untouched"


def test_nothing_of_a_choice_that_has_ended_comes_twice():
    delta = inference_pb2.GenerateResponse(
        delta=inference_pb2.Delta(choice=0, token_ids=[1], text="a", num_tokens=1)
    ).SerializeToString()
    finished = inference_pb2.GenerateResponse(
        finished=inference_pb2.Finished(choice=0, reason=4)
    ).SerializeToString()
    ledger = StreamLedger(CHOICES)
    assert [ledger.accept(raw) for raw in (delta, finished)] == [delta, finished]
    ledger.resume(exact=True)
    assert [ledger.accept(raw) for raw in (delta, finished)] == [None, None]
    assert ledger.num_tokens == 1


def test_other_numerics_are_said():
    client, _ = carried([3], [1, 1], 1000, exact=False)
    summary = seen(client)["summary"]
    assert summary.continuations == 1
    assert not summary.exact


def test_a_restart_before_the_first_token_is_no_continuation():
    client, _ = carried([1], [1, 1], 1000, exact=False)
    summary = seen(client)["summary"]
    assert summary.continuations == 0
    assert summary.exact


def test_only_the_summary_lost():
    source = engine(None)
    ledger = StreamLedger(CHOICES)
    for raw in source[:-1]:
        ledger.accept(raw)
    summary = inference_pb2.GenerateResponse.FromString(ledger.closing()).summary
    assert summary.usage.completion_tokens == sum(TOKENS)
    assert summary.usage.prompt_tokens == 9
    assert ledger.complete


def test_nothing_closes_while_a_choice_goes_on():
    ledger = StreamLedger(CHOICES)
    for raw in engine(None)[:5]:
        ledger.accept(raw)
    assert ledger.closing() is None


def test_raw_messages_are_bounded():
    ledger = StreamLedger(1, max_raw_bytes=1000)
    delta = inference_pb2.GenerateResponse(delta=inference_pb2.Delta(text="x" * 50, token_ids=[1]))
    raw = delta.SerializeToString()
    for _ in range(10_000):
        ledger.accept(raw)
        assert ledger._raw_bytes <= 1000 + len(raw)
    assert ledger.num_tokens == 10_000
    assert ledger.continuation().choices[0].sent_text_bytes == 500_000


def test_a_stream_that_began_as_a_continuation_adds_to_it():
    base = engine_pb2.Continuation()
    base.choices.add(index=0, token_ids=[0, 1], sent_text_bytes=3)
    base.choices.add(index=1, token_ids=[100, 101, 102], finished=True, sent_text_bytes=16)
    ledger = StreamLedger(CHOICES, base)
    assert ledger.empty
    source = engine(base)
    for raw in source[:2]:
        assert ledger.accept(raw) == raw
    known = ledger.continuation()
    assert list(known.choices[0].token_ids) == [0, 1, 2]
    assert known.choices[0].sent_text_bytes == len("0é1é".encode())
    assert known.choices[1].finished


def test_foreign_bytes_are_a_fault_of_the_engine():
    ledger = StreamLedger(1)
    ledger.accept(b"\xff\xff\xff\xff")
    with pytest.raises(InternalError) as caught:
        ledger.continuation()
    assert caught.value.reason == "MALFORMED_STREAM"
