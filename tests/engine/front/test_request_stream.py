"""How a request ends, by what its reader has already got."""

import asyncio

import pytest

from services.common.errors import (
    AbortedError,
    InternalError,
    ResourceExhaustedError,
    UnavailableError,
)
from services.common.text import Tokenizer
from services.common.text.byte_level import byte_assets
from services.engine.contract.messages import ChoiceOutput
from services.engine.contract.sampling_params import SamplingParams
from services.engine.front.request_stream import RequestStream
from services.engine.front.request_times import RequestTimes
from services.engine.front.request_translation import AcceptedRequest, ModelFacts

FACTS = ModelFacts("tiny", "r", "n", vocab_size=259, max_model_len=64, engine_id="e")
TOKENS = Tokenizer(byte_assets())


def stream(buffer_tokens=100, **parts):
    request = AcceptedRequest(
        request_id="r", prompt_token_ids=[65, 66], params=SamplingParams(seed=1), **parts
    )
    return RequestStream("k", request, FACTS, TOKENS, RequestTimes(), buffer_tokens=buffer_tokens)


def output(text, end=None):
    return ChoiceOutput("k", 0, list(text.encode()), end)


def kinds(events):
    return [event.WhichOneof("event") for event in events]


async def test_unread_deltas_are_joined():
    made = stream()
    for char in "abc":
        made.add_output(output(char))
    started, delta = await made.next_events()
    assert started.WhichOneof("event") == "started"
    assert delta.delta.text == "abc"
    made.add_output(output("d", "MAX_TOKENS"))
    assert kinds(await made.next_events()) == ["delta", "finished", "summary"]
    assert await made.next_events() == []


async def test_an_interruption_before_the_first_event_sends_none():
    made = stream()
    made.add_output(output("abc"))
    made.interrupt("gone", "CORE_DIED")
    with pytest.raises(UnavailableError) as caught:
        await made.next_events()
    assert caught.value.reason == "CORE_DIED"
    assert caught.value.retry_after_s is not None


async def test_a_later_interruption_sends_what_is_left_and_then_the_counts():
    made = stream()
    made.add_output(output("a"))
    await made.next_events()
    made.add_output(output("bc"))
    made.interrupt("gone", "CORE_DIED")
    made.add_output(output("never"))
    (event,) = await made.next_events()
    assert event.delta.text == "bc"
    with pytest.raises(AbortedError) as caught:
        await made.next_events()
    assert caught.value.metadata == {"prompt_tokens": "2", "completion_tokens": "3"}


async def test_a_slow_reader_s_backlog_is_dropped_with_its_status():
    made = stream(buffer_tokens=3)
    made.add_output(output("a"))
    await made.next_events()
    made.add_output(output("bcd"))
    assert made.error is None
    made.add_output(output("e"))
    with pytest.raises(ResourceExhaustedError):
        await made.next_events()


async def test_the_first_error_counts_and_none_after_the_end():
    made = stream()
    waiting = asyncio.ensure_future(made.next_events())
    await asyncio.sleep(0)
    made.fail(InternalError("first"))
    made.fail(UnavailableError("second"))
    with pytest.raises(InternalError, match="first"):
        await waiting
    made = stream()
    made.add_output(output("a", "MAX_TOKENS"))
    made.fail(UnavailableError("too late"))
    assert kinds(await made.next_events())[-1] == "summary"


async def test_the_interval_holds_back_and_the_end_releases():
    made = stream(stream_interval=3)
    waiting = asyncio.ensure_future(made.next_events())
    made.add_output(output("ab"))
    await asyncio.sleep(0)
    assert not waiting.done()
    made.add_output(output("c"))
    assert (await waiting)[1].delta.text == "abc"
    made.add_output(output("d", "MAX_TOKENS"))
    assert (await made.next_events())[0].delta.text == "d"


async def test_special_tokens_show_if_requested_and_end_tokens_never():
    """Also after a continuation, which counts the text as it was shown."""
    begin, end = 257, 258
    for shown, text in ((frozenset({begin, end}), "a<|im_start|>b"), (frozenset(), "ab")):
        made = stream(shown_token_ids=shown)
        made.add_output(ChoiceOutput("k", 0, [97, begin], None))
        made.add_output(ChoiceOutput("k", 0, [98, end], "EOS"))
        events = await made.next_events()
        assert events[1].delta.text == text
        resumed = stream(
            shown_token_ids=shown,
            continued=((97, begin),),
            sent_text_bytes=(len(text) - 1,),
        )
        resumed.add_output(ChoiceOutput("k", 0, [98, end], "EOS"))
        assert (await resumed.next_events())[1].delta.text == "b"
